"""Making, writing and reading task files (JSON lines)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from pydantic import ValidationError

from nano_rl.tasks.views import EXTRA, LEVELS, VIEWS
from nano_shared.errors import UsageError
from nano_shared.hashing import content_hash
from nano_shared.types import Split, Task

SUITES = ("functions",)


def make_tasks(
    *,
    levels: Sequence[int],
    n: int,
    seed: int,
    split: Split,
    suite: str = "functions",
    views: Sequence[str] = (),
) -> list[Task]:
    """`n` distinct tasks, even over levels and their views; the same arguments make the same tasks.

    Raises UsageError for an unknown suite, level or view, and where the views asked for are exhausted.
    """
    slots = _slots(suite, levels, views)
    tasks: dict[str, Task] = {}
    for attempt in range(50 * n + 1000):
        if len(tasks) == n:
            return list(tasks.values())
        level, view = slots[len(tasks) % len(slots)]
        task = VIEWS[view](split, Random(content_hash([seed, str(split), attempt])))
        if task is not None and task.level == level:
            provenance = task.provenance.model_copy(update={"seed": seed})
            tasks.setdefault(task.key, task.model_copy(update={"provenance": provenance}))
    raise UsageError(f"found only {len(tasks)} distinct tasks of {n}; ask for more views or fewer tasks")


def _slots(suite: str, levels: Sequence[int], views: Sequence[str]) -> list[tuple[int, str]]:
    if suite not in SUITES:
        raise UsageError(f"unknown suite {suite!r}; known: {', '.join(SUITES)}")
    if unknown := [level for level in levels if level not in LEVELS]:
        raise UsageError(f"no level {unknown[0]}; there are {', '.join(map(str, LEVELS))}")
    if unknown_views := [view for view in views if view not in VIEWS]:
        raise UsageError(f"unknown view {unknown_views[0]!r}; known: {', '.join(VIEWS)}")
    slots = [
        (level, view)
        for level in levels
        for view in (LEVELS[level] if not views else (*LEVELS[level], *EXTRA.get(level, ())))
        if not views or view in views
    ]
    if not slots:
        raise UsageError(
            f"none of the views {', '.join(views)} exists at levels {', '.join(map(str, levels))}"
        )
    return slots


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(task.model_dump_json() + "\n" for task in tasks), encoding="utf-8")


def read_tasks(path: Path) -> list[Task]:
    """Every task of a JSON lines file. Raises UsageError naming file, line and field; no row is skipped."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON text may hold other ends of lines
    except FileNotFoundError:
        raise UsageError(f"no such task file: {path}; nano-rl tasks make writes one") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"cannot read the task file {path}: {problem}") from None
    tasks = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise UsageError(f"{path} holds no tasks; nano-rl tasks make writes some")
    return tasks


def _row(path: Path, number: int, line: str) -> Task:
    try:
        return Task.model_validate_json(line)
    except ValidationError as problem:
        error = problem.errors()[0]
        field = ".".join(str(part) for part in error["loc"]) or "row"
        raise UsageError(f"{path}, line {number}: {field}: {error['msg'].lower()}") from None
