"""`nano-rl grade`: a folder against a task, or logged runs from the log alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Column, Table
from typer import Argument, Option

from nano_coder.commands.options import DirectoryOption, open_log
from nano_coder.grading.grade import GRADERS, by_grader, find_grader, grade_folder
from nano_coder.run.execution import regrade_run
from nano_rl.command_setup import sandbox_opener
from nano_rl.commands.options import Log
from nano_rl.tasks.task_file import read_tasks
from nano_shared.command_line import Console, JsonOption, emit
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import Task, Verdict

_SHOWN = 3


def command(
    runs: Annotated[list[str] | None, Argument(metavar="RUN")] = None,
    task_name: Annotated[
        str | None, Option("--task", metavar="FILE#ID", help="Task file, and which of its tasks.")
    ] = None,
    workspace: Annotated[Path | None, Option(metavar="DIR", help="Folder to grade.")] = None,
    answer: Annotated[str | None, Option(help="Answer to grade, where the task asks for one.")] = None,
    grader: Annotated[
        str | None, Option(metavar="NAME", help=f"{', '.join(map(repr, GRADERS))}; the last word is enough.")
    ] = None,
    as_json: JsonOption = False,
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Grade RUNs of the log from what is stored of them, or one folder against one task.

    A verdict ends with 0, whatever its reward; without one, because the grader failed, with 1.
    """
    name = find_grader(grader)
    if runs:
        if task_name is not None or workspace is not None or answer is not None:
            raise UsageError("RUNs are graded by their own tasks; leave out --task, --workspace and --answer")
        return grade_runs(runs, name, open_log(log, directory), as_json=as_json)
    if task_name is None or workspace is None:
        raise UsageError("name runs of the log, or a folder: --task FILE.jsonl#ID --workspace DIR")
    if not workspace.is_dir():
        raise UsageError(f"no such folder: {workspace}")
    verdict = by_grader(name, grade_folder(find_task(task_name), workspace, answer, sandbox_opener()()))
    emit(verdict, as_json, lambda: show(verdict))
    return 0 if verdict.reward is not None else 1


def grade_runs(names: Sequence[str], grader: str, opened: LogStore, *, as_json: bool) -> int:
    with opened as store:
        ids = list(dict.fromkeys(store.resolve(name) for name in names))
        sandbox = sandbox_opener()()
        columns = ("task", "verdict", "reward", "checks passed", "tampering", "failure")
        # an id is there to be copied
        table = Table(
            Column("run", no_wrap=True, min_width=max(map(len, ids), default=0)), *columns, box=None
        )
        worst = 0
        for run in ids:
            old = store.verdicts(run)
            trajectory = regrade_run(run, store, sandbox, grader)
            new = trajectory.verdict
            assert new is not None
            worst = max(worst, int(new.reward is None))
            if as_json:
                whole = {"run": run, "task": trajectory.task.key, **new.model_dump(mode="json")}
                before = [{"grader": v.grader, "reward": v.reward} for v in old]
                print(json.dumps({**whole, "before": before}))
            for verdict, age in [*((v, "") for v in old), (new, " (new)")]:
                table.add_row(run, trajectory.task.key, verdict.grader + age, *_cells(verdict))
    if not as_json:
        Console().print(table)
    return worst


def _cells(verdict: Verdict) -> tuple[str, str, str, str]:
    reward = "none" if verdict.reward is None else f"{verdict.reward:g}"
    passed = sum(state == "pass" for state in verdict.checks.values())
    kinds = ", ".join(dict.fromkeys(found.kind for found in verdict.tampering))
    return reward, f"{passed} of {len(verdict.checks)}", kinds, verdict.failure_kind or ""


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
    reward, passed, _, _ = _cells(verdict)
    table = Table(show_header=False, box=None)
    table.add_row("reward", reward)
    table.add_row("checks passed", passed)
    if verdict.failure_kind:
        table.add_row("failure", verdict.failure_kind)
    for found in verdict.tampering:
        table.add_row("tampering", f"{found.kind}: {found.detail}")
    table.add_row("grader", f"{verdict.grader}, trust {verdict.trust}")
    Console().print(table)
