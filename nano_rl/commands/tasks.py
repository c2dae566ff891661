"""`nano-rl tasks`: make task files, and list them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from nano_rl.commands import tasks_export, tasks_import, tasks_serve
from nano_rl.tasks import make_tasks, read_tasks, write_tasks
from nano_shared.errors import UsageError
from nano_shared.types import Split


@click.group("tasks")
def command() -> None:
    """Make and list tasks."""


command.add_command(tasks_import.command)
command.add_command(tasks_export.command)
command.add_command(tasks_serve.command)


@command.command("make")
@click.option("--suite", default="functions", show_default=True)
@click.option(
    "--level", "levels", default="0-3", show_default=True, help="One level, or a range such as 0-3."
)
@click.option("--view", "views", help="Views, separated by commas; default all of the levels.")
@click.option("-n", "n", type=click.IntRange(1), default=200, show_default=True, help="Number of tasks.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--split", type=click.Choice([s.value for s in Split]), default="train", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="File; default from the options."
)
def make(suite: str, levels: str, views: str | None, n: int, seed: int, split: str, out: Path | None) -> int:
    """Make N tasks into a JSON lines file. Train and test share no program family."""
    tasks = make_tasks(
        suite=suite,
        levels=parse_levels(levels),
        n=n,
        seed=seed,
        split=Split(split),
        views=tuple(views.split(",")) if views else (),
    )
    target = out or Path(f"{suite}-{levels}-{split}-{seed}.jsonl")
    write_tasks(target, tasks)
    print(target)
    return 0


@command.command("list")
@click.argument("file", type=click.Path(path_type=Path))
def list_tasks(file: Path) -> int:
    """What is in a task file: tasks by level, view and split."""
    counts = Counter((task.level, task.view, task.split) for task in read_tasks(file))
    table = Table("level", "view", "split", "tasks", box=None)
    for (level, view, split), count in sorted(counts.items(), key=str):
        table.add_row(str(level), str(view), str(split), str(count))
    Console().print(table)
    return 0


def parse_levels(text: str) -> tuple[int, ...]:
    """`2` or `0-3` as levels. Raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise UsageError(f"--level {text!r} is neither a level nor a range such as 0-3")
    return tuple(range(int(match[1]), int(match[2] or match[1]) + 1))
