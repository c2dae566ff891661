"""Task files: strict JSON lines (no duplicate keys, no NaN or infinity)."""

from __future__ import annotations

import gzip
import keyword
import math
import posixpath
import unicodedata
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from nano_shared.errors import Refusal, Refused, UsageError
from nano_shared.extension_points import Extensions
from nano_shared.hidden_checks import Case, CaseChecks, MutantChecks, SuiteChecks, WorkspaceChecks
from nano_shared.strict_json import (
    GZIP,
    Row,
    at_place,
    json_object,
    parse_json,
    refusing_invalid,
    text_lines,
    to_json,
    validated,
)
from nano_shared.types import Task, stays_inside

RowModel = TypeVar("RowModel", bound=BaseModel)


def read_text(path: Path) -> str:
    """Read a text file, decompressed if it is gzip's. Raises UsageError if it cannot be read."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == GZIP else data).decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: row: is not UTF-8: {problem.reason}; save it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as problem:
        raise UsageError(f"{path}: cannot be read: {problem}") from None


def read_rows(path: Path) -> Iterator[tuple[str, Row | Refusal]]:
    """(place, row) of each row: one JSON object per line, or one JSON array of objects."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            items = _parsed(text)
        except Refused as problem:
            yield str(path), Refusal.of(str(path), problem)
            return
        for number, item in enumerate(items):
            yield _object(f"{path}[{number}]", item)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield _object(where, _parsed(line))
            except Refused as problem:
                yield where, Refusal.of(where, problem)


def _parsed(text: str) -> Any:
    value = parse_json(text)
    if "\\ud" in text.lower():
        to_json(value)  # refuses half of a surrogate pair
    return value


def read_models(path: Path, kind: type[RowModel]) -> Iterator[tuple[str, RowModel]]:
    """(place, row) of each row as a model. Raises UsageError with place and field of the first bad row."""
    for where, row in read_rows(path):
        try:
            if isinstance(row, Refusal):
                raise Refused(row.field, row.why)
            yield where, validated(kind, row)
        except Refused as problem:
            raise UsageError(f"{where}: {problem}") from None


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")


def _object(where: str, item: Any) -> tuple[str, Row | Refusal]:
    if isinstance(item, dict):
        return where, item
    return where, Refusal(where, "row", f"must be a JSON object, not {type(item).__name__}")


class FileRow(BaseModel):
    """A row of a task file that is no `Task` as it stands; `task` makes one of it."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("target", check_fields=False)
    @classmethod
    def _inside(cls, target: str) -> str:
        if not target or target.startswith(("/", "../")) or posixpath.normpath(target) != target:
            raise ValueError(f"{target!r} is no path inside the workspace; write it as 'folder/file.py'")
        return target

    @field_validator("entry_point", check_fields=False)
    @classmethod
    def _as_python_reads_it(cls, name: str | None) -> str | None:
        return None if name is None else unicodedata.normalize("NFKC", name)

    def task(self) -> Task:
        raise NotImplementedError


ROW_KINDS: Extensions[type[FileRow]] = Extensions("nano.task_rows")


class PlainRow(FileRow):
    id: str
    prompt: str = Field(pattern=r"\S")
    target: str = "solution.py"
    entry_point: str
    cases: list[Case] = Field(min_length=1)
    files: dict[str, str] = {}

    @field_validator("cases")
    @classmethod
    def _complete(cls, cases: list[Case]) -> list[Case]:
        for number, case in enumerate(cases):
            if "expected" not in case.model_fields_set:
                raise ValueError(f"case {number} lacks `expected`; null has to be written too")
        return cases

    @field_validator("entry_point")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"{name!r} is no name that Python gives a function")
        return name

    def task(self) -> Task:
        hidden = CaseChecks(entry_point=self.entry_point, cases=tuple(self.cases))
        return Task(
            key=self.id, prompt=with_place(self.prompt, self.target, self.entry_point), files=self.files,
            artifacts=(self.target,), hidden=hidden,
        )  # fmt: skip


def read_row(line: str) -> Task:
    """Parse one line of a task file: a task, a function with its cases, or a published row. Raises Refused
    with the first invalid field, UsageError for a published row without the plug-in for those."""
    row = json_object(line, finite=False)
    for name, field in row.items():
        if not _is_finite(field):
            raise Refused(name, "holds NaN or an infinity, which is no JSON number")
    kind: type[Task] | type[FileRow] = Task
    if "key" not in row and "id" in row:
        if "tests" not in row and "cases" not in row:
            raise Refused("cases", "is missing, and `tests` too: nothing says how the row is graded")
        kind = ROW_KINDS.find("published") if "tests" in row else PlainRow
    with refusing_invalid():
        value = kind.model_validate_json(line)
        if isinstance(value, FileRow):
            return value.task()
    for name in value.artifacts:
        if not stays_inside(name):
            raise Refused("artifacts", f"{name!r} must be relative and stay inside the workspace")
    return value


def with_place(prompt: str, target: str, entry_point: str | None) -> str:
    name = f"; it must define `{entry_point}`" if entry_point else ""
    return f"{prompt.rstrip()}\n\nThe solution belongs in the file `{target}`{name}."


def _is_finite(value: JsonValue) -> bool:
    held = [value]
    while held:
        value = held.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return False
        held += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return True


def refuse_unwritable(path: Path, source: Path | None = None) -> None:
    """Create the folder of an output file. Raises UsageError if the file cannot be written, and if it is the
    `source` that is read."""
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"{path} is what is read, and would be overwritten; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = path.exists()
        path.open("a").close()
        if not known:
            path.unlink()
    except OSError as problem:
        raise UsageError(f"{path} cannot be written: {problem.strerror}; name another file") from problem


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for task in tasks:
            file.write(task.model_dump_json(exclude_defaults=True) + "\n")


def read_tasks(path: Path) -> list[Task]:
    """All tasks of a file (`read_row`). Raises UsageError with file, line and field for a malformed row, a
    duplicate key, and a file that is missing, unreadable or empty."""
    if not path.exists():
        raise UsageError(f"no such task file: {path}; nano-rl tasks make writes one")
    tasks: dict[str, Task] = {}
    for where, line in text_lines(path):
        with at_place(where):
            task = read_row(line)
            if task.key in tasks:
                raise Refused("key", f"{task.key!r} is already used by an earlier line")
        tasks[task.key] = task
    if not tasks:
        raise UsageError(f"{path}: holds no task; one JSON object a line is expected")
    return list(tasks.values())


_OURS = "nano"
"""what the names of our own generators begin with: they run the oracle when they make a task"""


def unproven(tasks: Iterable[Task]) -> list[Task]:
    """The tasks whose tests are programs and whose oracle was never run: a right answer may earn nothing."""
    return [
        task
        for task in tasks
        if isinstance(task.hidden, SuiteChecks | WorkspaceChecks | MutantChecks)
        and task.provenance.checked is None
        and not (task.provenance.generator or "").startswith(_OURS)
    ]
