"""`nano-rl tasks list`: what is in a task file, or which suites there are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
from rich.table import Table

from nano_rl.tasks.make import read_tasks
from nano_rl.tasks.suite import find_suite, suite_names
from nano_shared.console import Console
from nano_shared.errors import UsageError


@click.command("list")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--suites", is_flag=True, help="Every suite with its levels and views.")
def command(file: Path | None, suites: bool) -> int:
    """What is in a task file: tasks by level, view and split. With --suites: what can be made."""
    if suites == (file is not None):
        raise UsageError("name a task file, or give --suites to see what can be made")
    Console().print(_suites() if file is None else _tasks(file))
    return 0


def _tasks(file: Path) -> Table:
    counts = Counter((task.level, task.view, task.split) for task in read_tasks(file))
    table = Table("level", "view", "split", "tasks", box=None)
    for (level, view, split), count in sorted(counts.items(), key=str):
        table.add_row(str(level), str(view), str(split), str(count))
    return table


def _suites() -> Table:
    table = Table("suite", "level", "views", "about", box=None)
    for name in suite_names():
        suite = find_suite(name)
        for level in sorted({view.level for view in suite.views}):
            named = (v.name + (" (by name only)" if v.extra else "") for v in suite.views if v.level == level)
            table.add_row(name, str(level), ", ".join(named), suite.about)
    return table
