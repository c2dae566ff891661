"""Progress of long commands: bars on stderr, tables on stdout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from nano_rl.evaluate import Row


class Bar:
    """One progress bar with a changing remark."""

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total, remark="")

    def advance(self, remark: str = "") -> None:
        self._progress.update(self._task, advance=1, remark=remark)

    def reach(self, done: int, total: int, remark: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, remark=remark)


@contextmanager
def bar(label: str, total: int) -> Iterator[Bar]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[remark]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bar(progress, label, total)


def print_rows(rows: list[Row]) -> None:
    """A table of success rates with their 95 % intervals."""
    table = Table("tasks", "success", "95 % interval", "of", "not graded", box=None)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.rate:.1%}",
            f"{row.low:.1%} to {row.high:.1%}",
            f"{row.successes}/{row.graded}",
            str(row.ungraded),
        )
    Console().print(table)
