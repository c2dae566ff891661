"""`nano-rl grade`: a folder against a task, or logged runs from the log alone."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from nano_coder.runtime import grade_folder, open_sandbox
from nano_rl.commands.session import log_option
from nano_rl.tasks import read_tasks
from nano_shared.errors import UsageError
from nano_shared.types import Task, Verdict

_SHOWN = 3


@click.command("grade")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--task", "task_name", metavar="FILE[#ID]", help="Task file, and which of its tasks.")
@click.option("--workspace", type=click.Path(path_type=Path), metavar="DIR", help="Folder to grade.")
@click.option("--answer", help="Answer to grade, where the task asks for one.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as one JSON object.")
@log_option
def command(
    runs: tuple[str, ...], task_name: str | None, workspace: Path | None, answer: str | None, as_json: bool,
    log: str | None,
) -> int:  # fmt: skip
    """Grade RUNs of the log from what is stored of them, or one folder against one task.

    A verdict ends with 0, whatever its reward; without one, because the grader failed, with 1.
    """
    if task_name is None or workspace is None or runs:
        raise UsageError("name a task and a folder: --task FILE.jsonl#ID --workspace DIR")
    verdict = grade_folder(find_task(task_name), workspace, answer, open_sandbox())
    if as_json:
        print(json.dumps(verdict.model_dump(mode="json")))
    else:
        show(verdict)
    return 0 if verdict.reward is not None else 1


def find_task(name: str) -> Task:
    """The task of FILE, or of FILE#ID. Raises UsageError where it is not one."""
    file, wanted = Path(name), None
    if not file.is_file():
        cuts = [at for at, letter in enumerate(name) if letter == "#"]
        at = next((at for at in cuts if Path(name[:at]).is_file()), None)
        if at is None and cuts:
            at = cuts[0]
        if at is not None:
            file, wanted = Path(name[:at]), name[at + 1 :]
    tasks = {task.key: task for task in read_tasks(file)}
    some = ", ".join(list(tasks)[:_SHOWN]) + (", ..." if len(tasks) > _SHOWN else "")
    if wanted is None:
        if len(tasks) > 1:
            raise UsageError(f"{file} holds {len(tasks)} tasks; name one as {file}#ID, of {some}")
        return next(iter(tasks.values()))
    if wanted not in tasks:
        raise UsageError(f"{file} holds no task {wanted!r}; it holds {some}")
    return tasks[wanted]


def show(verdict: Verdict) -> None:
    reward = "none" if verdict.reward is None else f"{verdict.reward:g}"
    passed = sum(state == "pass" for state in verdict.checks.values())
    table = Table(show_header=False, box=None)
    table.add_row("reward", reward)
    table.add_row("checks", f"{passed} of {len(verdict.checks)} passed")
    if verdict.failure_kind:
        table.add_row("failure", verdict.failure_kind)
    for found in verdict.tampering:
        table.add_row("tampering", f"{found.kind}: {found.detail}")
    table.add_row("grader", f"{verdict.grader}, trust {verdict.trust}")
    Console().print(table)
