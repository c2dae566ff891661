"""What is kept of a project between cycles: its tasks with their part of the split, its cycles, its lock.

Everything lies in `NANO_HOME/improve/ID`, in files that are written whole or line by line, so that a process
that is killed loses the task or the outcome at hand and nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from nano_rl.improve.gate import GateDecision
from nano_rl.tasks.code_places import SplitPart
from nano_shared.errors import UsageError
from nano_shared.files import full_disk_explained, nano_home, write_text
from nano_shared.owners import project_id
from nano_shared.types import Task, Value

Kept = TypeVar("Kept", bound=Value)
_DIRECTORY = "directory"
Tell = Callable[[str], None]
"""what shows a line of progress"""


class ProjectTask(Value):
    """A task of the project, and where its change lies."""

    task: Task
    source: Literal["run", "commit", "mutant"]
    places: tuple[str, ...]
    part: SplitPart
    codes: tuple[str, ...] = ()
    """normalised code of its functions, solved"""
    cycle: int
    """number of the cycle that found it"""


class Cycle(Value):
    """One cycle, from its beginning on; a cycle without an end goes on when `improve` is called again."""

    number: int
    started: float
    """unix seconds"""
    ended: float | None = None
    baseline: str
    """the model that the project used as it began"""
    seen: dict[str, int] = Field({})
    """how many new runs, escalations and commits there were"""
    tasks: dict[str, int] = Field({})
    """how many tasks there are in each part, and of each source"""
    places: int = 0
    """held-out places"""
    candidate: str | None = None
    """name of the checkpoint; None: nothing was trained"""
    trained_seconds: float = 0.0
    """of all processes that trained the candidate"""
    rates: tuple[float, float] | None = None
    """success on the held-out tasks, before and after"""
    decision: GateDecision | None = None
    gained: dict[str, str] = Field({})
    """held-out place -> run that solved a task there which the policy before did not"""
    lost: dict[str, str] = Field({})
    """the same of tasks that it solved before and does not now"""
    said: str = ""
    """the line that it ended with"""


class ImprovedProject:
    def __init__(self, id: str, directory: Path) -> None:
        self.id = id
        self.directory = directory
        self.folder = nano_home() / "improve" / id

    @property
    def name(self) -> str:
        return self.directory.name or "root"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Raises UsageError where another process improves this project."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / _DIRECTORY, f"{self.directory}\n", UsageError)
        try:
            with FileLock(self.folder / "lock", timeout=0):
                yield
        except Timeout:
            raise UsageError(
                f"another process improves {self.name} already; nano-rl improve --status -C"
                f" {self.directory} shows what it does"
            ) from None

    def append(self, name: str, rows: Iterable[Value]) -> None:
        """Append rows to a file of the project, flushed one by one."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with full_disk_explained(path, UsageError), path.open("a+b") as file:
            if file.tell():  # a killed process may have left half a line
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            for row in rows:
                file.write(row.model_dump_json(exclude_defaults=True).encode() + b"\n")
                file.flush()

    def read(self, name: str, kind: type[Kept]) -> list[Kept]:
        return list(self._read(self.folder / name, kind))

    def cycles(self) -> list[Cycle]:
        """Oldest first. Raises UsageError for a damaged file."""
        found = []
        for path in sorted((self.folder / "cycles").glob("[0-9]*.json")):
            try:
                found.append(Cycle.model_validate_json(path.read_bytes()))
            except ValidationError:
                raise UsageError(f"{path} is damaged or of another nano; move it away") from None
        return found

    def save(self, cycle: Cycle) -> Cycle:
        folder = self.folder / "cycles"
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{cycle.number:04}.json", cycle.model_dump_json(indent=1) + "\n", UsageError)
        return cycle

    def begin(self, baseline: str) -> Cycle:
        """The cycle that was cut short, else a new one."""
        cycles = self.cycles()
        if cycles and cycles[-1].ended is None:
            return cycles[-1]
        return self.save(Cycle(number=len(cycles) + 1, started=time.time(), baseline=baseline))

    def _read(self, path: Path, kind: type[Kept]) -> Iterator[Kept]:
        """The rows of a file. A last line that is cut short counts for nothing."""
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                yield kind.model_validate_json(line)
            except ValidationError as problem:
                if number < len(lines) and line.endswith(b"}"):
                    first = problem.errors()[0]
                    raise UsageError(
                        f"{path}:{number} is damaged or of another nano ({first['msg']}); move the file away"
                    ) from None


def open_project(directory: Path) -> ImprovedProject:
    real = directory.resolve()
    return ImprovedProject(project_id(real), real)


def improved_projects() -> list[ImprovedProject]:
    """The projects that were ever improved here, by id."""
    folders = sorted((nano_home() / "improve").glob(f"*/{_DIRECTORY}"))
    return [ImprovedProject(path.parent.name, Path(path.read_text().strip())) for path in folders]


def directory_named(id: str) -> str:
    """Where a project was when it was last improved, by its id; the id itself if it never was."""
    try:
        return (nano_home() / "improve" / id / _DIRECTORY).read_text().strip()
    except OSError:
        return id


def counts(tasks: Iterable[ProjectTask]) -> dict[str, int]:
    """Number of tasks in each part and of each source."""
    listed = list(tasks)
    return dict(Counter(str(one.part) for one in listed) + Counter(one.source for one in listed))
