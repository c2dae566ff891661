"""`nano-rl tasks check`: which tasks of a file are fit to train on, and why the others are not."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from nano_rl.commands.options import jobs_option, log_option
from nano_rl.tasks.make import read_tasks, refuse_unwritable, write_tasks
from nano_shared.console import Console
from nano_shared.store import LogStore

if TYPE_CHECKING:
    from nano_rl.tasks.check import TaskFinding as Finding

SHOWN = 20
"""refused tasks that the report names"""


@click.command("check")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the admitted tasks to this file."
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A task file whose programs must not occur, such as the held-out tasks; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object with every finding.")
@jobs_option
@log_option
def command(
    file: Path, out: Path | None, against: tuple[Path, ...], as_json: bool, jobs: int, log: str | None
) -> int:
    """Run every task's oracle, starter and mutants. Exit code 1 where a task is refused and no --out takes
    the others, or where none is admitted."""
    from nano_rl.commands.progress import bar
    from nano_rl.tasks.admission import check_tasks, programs_of, without_repeats

    tasks = read_tasks(file)
    others: dict[str, str] = {}
    for other in against:
        others |= programs_of(read_tasks(other), other.name)
    if out is not None:
        refuse_unwritable(out)
    borrowed = any(task.snapshot for task in tasks)  # their files lie in the log that they were made from
    blobs = LogStore.open(log, create=False).blobs.root if borrowed else None
    findings, admitted = [], []
    with bar("checked", len(tasks)) as progress:
        found = check_tasks(tasks, jobs=min(jobs, len(tasks)), blobs=blobs)
        for task, finding in without_repeats(found, others=others):
            findings.append(finding)
            if finding.admitted:
                admitted.append(task)
            progress.advance()
    if out is not None and admitted:
        write_tasks(out, admitted)
    if as_json:
        rows = [finding.as_json() for finding in findings]
        print(json.dumps({"tasks": len(tasks), "admitted": len(admitted), "findings": rows}))
    else:
        print_findings(findings)
    if out is not None and not as_json:
        print(out if admitted else f"{out} is not written: no task is admitted")
    return int(not admitted if out is not None else len(admitted) < len(tasks))


def print_findings(findings: Sequence[Finding]) -> None:
    """A table by level and view, and the refused tasks with their reasons."""
    console = Console(width=160) if not Console().is_terminal else Console()
    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in findings:
        level = "-" if finding.level is None else str(finding.level)
        groups[level, finding.view or "-"].append(finding)
    table = Table("level", "view", "tasks", "admitted", "mutants killed", "seconds a task", box=None)
    for (level, view), members in sorted(groups.items()):
        rates = [m.kill_rate for m in members if m.kill_rate is not None]
        table.add_row(
            level, view, str(len(members)), str(sum(m.admitted for m in members)),
            f"{sum(rates) / len(rates):.1%}" if rates else "no program",
            f"{sum(m.seconds for m in members) / len(members):.2f}",
        )  # fmt: skip
    console.print(table)
    refused = [finding for finding in findings if not finding.admitted]
    for finding in refused[:SHOWN]:
        console.print(f"refused {finding.key}: {'; '.join(finding.reasons)}", soft_wrap=True)
    if len(refused) > SHOWN:
        console.print(f"and {len(refused) - SHOWN} more refused; --json names them all")
    console.print(f"{len(findings) - len(refused)} of {len(findings)} tasks admitted")
