"""`nano-rl tasks check`: which tasks are fit to train on."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Option

from nano_coder.commands.options import open_log
from nano_coder.grading import GRADER
from nano_mining.task_check import TaskFinding, admitted_tasks, check_tasks, programs_of, without_repeats
from nano_rl.command_setup import sandbox_opener
from nano_rl.commands.options import Log, TaskFile
from nano_rl.commands.progress import bar
from nano_rl.tasks.task_file import read_tasks, refuse_unwritable, write_tasks
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.types import Task

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
    log: Log = None,
) -> int:
    """Run every task's oracle, starter and mutants. Exit code 1 where a task is refused and no --out takes
    the others, or where none is admitted."""
    tasks = read_tasks(file)
    others: dict[str, str] = {}
    for other in against or ():
        others |= programs_of(read_tasks(other), other.name)
    if out is not None:
        refuse_unwritable(out, file)
    borrowed = any(task.snapshot for task in tasks)  # their files lie in the log that they were made from
    blobs = open_log(log).blobs.address if borrowed else None
    findings, admitted = [], []
    with bar("checked", len(tasks)) as progress:
        jobs = min(os.cpu_count() or 1, len(tasks))
        found = check_tasks(tasks, jobs=jobs, blobs=blobs, opener=sandbox_opener())
        for task, finding in without_repeats(found, others=others):
            findings.append(finding)
            if finding.admitted:
                origin = task.provenance.model_copy(update={"checked": GRADER})
                admitted.append(task.model_copy(update={"provenance": origin}))
            progress.advance()
    if out is not None and admitted:
        write_tasks(out, admitted)
    rows = [finding.as_json() for finding in findings]
    report = {"tasks": len(tasks), "admitted": len(admitted), "findings": rows}
    emit(report, as_json, lambda: print_findings(findings))
    if out is not None and not as_json:
        print(out if admitted else f"{out} is not written: no task is admitted")
    return int(not admitted if out is not None else len(admitted) < len(tasks))


def print_findings(findings: Sequence[TaskFinding]) -> None:
    console = Console(width=160) if not Console().is_terminal else Console()
    groups: dict[tuple[str, str], list[TaskFinding]] = defaultdict(list)
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


def admitted(drawn: Iterator[Task], n: int) -> list[Task]:
    """The first `n` tasks that are admitted, for `nano-rl tasks make --check`."""
    with bar("admitted", n) as progress:
        tasks, findings = admitted_tasks(
            drawn, n, on_task=lambda found: progress.advance() if found.admitted else None
        )
    print_findings(findings)
    return tasks
