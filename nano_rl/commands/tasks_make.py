"""`nano-rl tasks make`: tasks of a suite into a JSON lines file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Option

from nano_rl.commands.options import Jobs, Seed
from nano_rl.tasks.make import draw_tasks, refuse_unwritable, write_tasks
from nano_rl.tasks.suite import TaskSuite, find_suite
from nano_shared.errors import UsageError
from nano_shared.extensions import is_file_reference
from nano_shared.types import Split, Task


def command(
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
    jobs: Jobs = 2,
) -> int:
    """Make N tasks into a JSON lines file. Train and test share no program family."""
    supply = find_suite(suite)
    chosen = parse_levels(levels) if levels else _usual_levels(supply)
    levels = levels or f"{chosen[0]}-{chosen[-1]}"
    drawn = draw_tasks(
        suite=suite,
        levels=chosen,
        seed=seed,
        split=split,
        views=tuple(view for named in views or () for view in named.split(",")),
    )
    name = supply.name if is_file_reference(suite) else suite
    target = out or Path(f"{name}-{levels}-{split}-{seed}.jsonl")
    refuse_unwritable(target)
    tasks = _admitted(drawn, n, jobs) if check else list(itertools.islice(drawn, n))
    write_tasks(target, tasks)
    print(target)
    return 0


def _admitted(drawn: Iterator[Task], n: int, jobs: int) -> list[Task]:
    from nano_rl.commands.progress import bar
    from nano_rl.commands.tasks_check import print_findings
    from nano_rl.tasks.admission import admitted_tasks

    with bar("admitted", n) as progress:
        tasks, findings = admitted_tasks(
            drawn, n, jobs=jobs, on_task=lambda found: progress.advance() if found.admitted else None
        )
    print_findings(findings)
    return tasks


def _usual_levels(suite: TaskSuite) -> tuple[int, ...]:
    known = sorted({view.level for view in suite.views})
    return tuple(level for level in known if level <= 3) or tuple(known)


def parse_levels(text: str) -> tuple[int, ...]:
    """`2` or `0-3` as levels. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise UsageError(f"--level {text!r} is neither a level nor a range such as 0-3")
    return tuple(range(int(match[1]), int(match[2] or match[1]) + 1))
