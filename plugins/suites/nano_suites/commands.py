"""`nano-rl tasks make` and `list`: tasks of suites into files, and what suites and files hold."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Argument, Option

from nano_rl.commands.options import Seed
from nano_rl.tasks.suite import TASK_CHECKS, TaskSuite, find_suite, suite_names
from nano_rl.tasks.task_file import read_tasks, refuse_unwritable, write_tasks
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.errors import ConfigError, UsageError
from nano_shared.extension_points import is_reference
from nano_shared.types import Split
from nano_suites.drawing import draw_tasks


def make(
    suite: Annotated[str, Option(help="See nano-rl tasks list --suites.")] = "functions",
    levels: Annotated[
        str, Option("--level", help="One level, or a range such as 0-3; else those of the suite up to 3.")
    ] = "",
    views: Annotated[
        list[str] | None,
        Option("--view", help="Views, separated by commas or given apart; else all of the levels."),
    ] = None,
    n: Annotated[int, Option("-n", min=1, help="Number of tasks.")] = 200,
    seed: Seed = 0,
    split: Annotated[Split, Option(help="Of the program families.")] = Split.TRAIN,
    out: Annotated[Path | None, Option(help="File; default from the options.")] = None,
    check: Annotated[
        bool, Option("--check", help="Draw until N tasks are admitted, as by nano-rl tasks check.")
    ] = False,
) -> int:
    """Make N tasks into a JSON lines file. Train and test share no program family."""
    supply = find_suite(suite)
    chosen = parse_levels(levels) if levels else _usual_levels(supply)
    levels = levels or f"{chosen[0]}-{chosen[-1]}"
    drawn = draw_tasks(
        suite=suite, levels=chosen, seed=seed, split=split,
        views=tuple(view for named in views or () for view in named.split(",")),
    )  # fmt: skip
    name = supply.name if is_reference(suite) else suite
    target = out or Path(f"{name}-{levels}-{split}-{seed}.jsonl")
    refuse_unwritable(target)
    tasks = TASK_CHECKS.find("oracles")(drawn, n) if check else list(itertools.islice(drawn, n))
    write_tasks(target, tasks)
    if len(tasks) > 1 and len({task.program_hash or task.key for task in tasks}) == 1:
        print(
            f"all {len(tasks)} tasks are of one program, so that results on them have no interval; another"
            " --level, --view or --split has more programs",
            file=sys.stderr,
        )
    print(target)
    return 0


def _usual_levels(suite: TaskSuite) -> tuple[int, ...]:
    known = sorted({view.level for view in suite.views})
    return tuple(level for level in known if level <= 3) or tuple(known)


def parse_levels(text: str) -> tuple[int, ...]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise UsageError(f"--level {text!r} is neither a level nor a range such as 0-3")
    return tuple(range(int(match[1]), int(match[2] or match[1]) + 1))


def list_tasks(
    file: Annotated[Path | None, Argument(metavar="FILE", help="JSON lines of tasks.")] = None,
    suites: Annotated[bool, Option("--suites", help="Every suite with its levels and views.")] = False,
    as_json: JsonOption = False,
) -> int:
    """What is in a task file: tasks by level, view and split. With --suites: what can be made."""
    if suites == (file is not None):
        raise UsageError("name a task file, or give --suites to see what can be made")
    rows, broken = _suite_rows() if file is None else (_task_rows(file), [])
    for problem in broken:
        print(f"error: {problem}", file=sys.stderr)
    code = broken[0].exit_code if broken else 0
    columns = ("suite", "level", "views", "about") if file is None else ("level", "view", "split", "tasks")
    emit(rows, as_json, lambda: _show_rows(rows, columns))
    return code


def _show_rows(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    table = Table(*columns, box=None)
    described = None
    for row in rows:
        if "suite" in row and row["suite"] == described:
            row |= {"suite": "", "about": ""}
        else:
            described = row.get("suite")
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)


def _task_rows(file: Path) -> list[dict[str, Any]]:
    counts = Counter((task.level, task.view, task.split) for task in read_tasks(file))
    return [
        {"level": level, "view": view, "split": split, "tasks": count}
        for (level, view, split), count in sorted(counts.items(), key=str)
    ]


def _suite_rows() -> tuple[list[dict[str, Any]], list[ConfigError]]:
    """The rows of all suites that can be loaded, and why others cannot."""
    rows: list[dict[str, Any]] = []
    broken: list[ConfigError] = []
    for name in suite_names():
        try:
            suite = find_suite(name)
        except ConfigError as problem:
            broken.append(problem)
            continue
        for level in sorted({view.level for view in suite.views}):
            named = (v.name + (" (by name only)" if v.extra else "") for v in suite.views if v.level == level)
            rows.append({"suite": name, "level": level, "views": ", ".join(named), "about": suite.about})
    return rows, broken
