"""`nano-rl tasks check`: which tasks of a file are fit to train on, and why the others are not."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Option

from nano_coder.commands.options import open_log
from nano_rl.commands.options import Jobs, Log, TaskFile
from nano_rl.tasks.make import read_tasks, refuse_unwritable, write_tasks
from nano_shared.command_line import JsonOption
from nano_shared.console import Console

if TYPE_CHECKING:
    from nano_rl.tasks.check import TaskFinding as Finding

SHOWN = 20
"""refused tasks that the report names"""


def command(
    file: TaskFile,
    out: Annotated[Path | None, Option(help="Write the admitted tasks to this file.")] = None,
    against: Annotated[
        list[Path] | None,
        Option(help="A task file whose programs must not occur, as the held-out tasks; repeatable."),
    ] = None,
    as_json: JsonOption = False,
    jobs: Jobs = 2,
    log: Log = None,
) -> int:
    """Run every task's oracle, starter and mutants. Exit code 1 where a task is refused and no --out takes
    the others, or where none is admitted."""
    from nano_rl.commands.progress import bar
    from nano_rl.tasks.admission import check_tasks, programs_of, without_repeats

    tasks = read_tasks(file)
    others: dict[str, str] = {}
    for other in against or ():
        others |= programs_of(read_tasks(other), other.name)
    if out is not None:
        refuse_unwritable(out)
    borrowed = any(task.snapshot for task in tasks)  # their files lie in the log that they were made from
    blobs = open_log(log).blobs.address if borrowed else None
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
