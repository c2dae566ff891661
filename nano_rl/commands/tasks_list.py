"""`nano-rl tasks list`: what is in a task file, or which suites there are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from nano_rl.tasks.make import read_tasks
from nano_rl.tasks.suite import find_suite, suite_names
from nano_shared.command_line import JsonOption
from nano_shared.console import Console
from nano_shared.errors import UsageError


def command(
    file: Annotated[Path | None, Argument(metavar="FILE", help="JSON lines of tasks.")] = None,
    suites: Annotated[bool, Option("--suites", help="Every suite with its levels and views.")] = False,
    as_json: JsonOption = False,
) -> int:
    """What is in a task file: tasks by level, view and split. With --suites: what can be made."""
    if suites == (file is not None):
        raise UsageError("name a task file, or give --suites to see what can be made")
    rows = _suites() if file is None else _tasks(file)
    if as_json:
        print(json.dumps(rows))
        return 0
    columns = ("suite", "level", "views", "about") if file is None else ("level", "view", "split", "tasks")
    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)
    return 0


def _tasks(file: Path) -> list[dict[str, Any]]:
    counts = Counter((task.level, task.view, task.split) for task in read_tasks(file))
    return [
        {"level": level, "view": view, "split": split, "tasks": count}
        for (level, view, split), count in sorted(counts.items(), key=str)
    ]


def _suites() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in suite_names():
        suite = find_suite(name)
        for level in sorted({view.level for view in suite.views}):
            named = (v.name + (" (by name only)" if v.extra else "") for v in suite.views if v.level == level)
            rows.append({"suite": name, "level": level, "views": ", ".join(named), "about": suite.about})
    return rows
