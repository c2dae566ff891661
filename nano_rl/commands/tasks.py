"""`nano-rl tasks from-log`: tasks of logged runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nano_coder.commands.options import DirectoryOption, open_log
from nano_coder.verify.trainable import RefusalCode
from nano_rl.command_setup import sandbox_opener
from nano_rl.commands.options import Log, Seed
from nano_rl.tasks.from_log import LoggedTask, MutantSearch, distinct, mutant_tasks, task_from_run
from nano_rl.tasks.task_file import refuse_unwritable, write_tasks
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import UsageError
from nano_shared.printable import printable


def from_log(
    runs: Annotated[list[str], Argument(metavar="RUN")],
    check: Annotated[
        str | None, Option(help="Shell line that grades the task and that no agent sees; else the run's own.")
    ] = None,
    out: Annotated[
        Path | None, Option("-o", "--out", help="File of the rows; else they go to standard output.")
    ] = None,
    mutants: Annotated[
        int, Option(min=0, help="Also so many tasks that change a line of what passing runs left.")
    ] = 0,
    seed: Seed = 0,
    as_json: JsonOption = False,
    directory: DirectoryOption = Path(),
    log: Log = None,
) -> int:
    """Make a task of each RUN (an id, the beginning of one, or `last`).

    The task begins in the workspace that the run began in. --check is run in a fresh jail on those files plus
    what an agent changed, with tests and configuration as they were. A run that passes gives the oracle; of a
    mutant, on which the check must fail, the oracle is the line put back.
    """
    if check is not None and not check.strip():
        raise UsageError("--check is empty; give a shell line, or leave it out to keep the run's own check")
    if as_json and out is None:
        raise UsageError("--json prints what was made, so the rows need a file: name one with -o")
    store = open_log(log, directory)
    chosen = [store.get(run) for run in runs]
    if kept := next((run for run in chosen if store.withholds(run)), None):
        raise UsageError(f"run {kept.id} of {kept.owner}: {RefusalCode.NO_CONSENT.meaning}")
    sandbox = sandbox_opener()()
    if out is not None:
        refuse_unwritable(out)
    every = [task_from_run(run, store.blobs, sandbox, check) for run in chosen]
    made = distinct(every)
    tasks = [logged.task for logged in made]
    lines: list[str] = []
    if mutants:
        both = zip(chosen, every, strict=True)
        passed = [run.model_copy(update={"task": of.task}) for run, of in both if of.reward == 1]
        more, report = mutant_tasks(passed, MutantSearch(count=mutants, seed=seed), store.blobs, sandbox)
        tasks, lines = tasks + more, [report]
    if out is None:
        for task in tasks:
            print(task.model_dump_json(exclude_defaults=True))
    else:
        write_tasks(out, tasks)
    for logged in made:
        solved = _solved(logged)
        where = "" if logged.portable else "; its files stay in the blobs of this log"
        lines.append(
            f"{logged.task.key} from run {logged.run}: trust {logged.trust},"
            f" reward {logged.reward}; {solved}{where}"
        )
    made_rows = [
        {
            "key": m.task.key, "run": m.run, "trust": m.trust, "reward": m.reward,
            "oracle": m.task.oracle is not None, "portable": m.portable, "failure_kind": m.failure_kind,
        }
        for m in made
    ]  # fmt: skip
    report_stream = sys.stderr if out is None else sys.stdout
    emit(
        {"tasks": made_rows, "mutants": len(tasks) - len(made), "file": str(out)},
        as_json,
        lambda: print(printable("\n".join(lines)), file=report_stream),
    )
    return 0


def _solved(logged: LoggedTask) -> str:
    if logged.reward == 1:
        return "the run solves it"
    if logged.task.oracle:
        return "its own oracle solves it, the run does not"
    if logged.failure_kind == "check_not_found":
        return (
            "no run is known to solve it; the check names a program that is not there, try it with"
            " nano-coder exec"
        )
    return "no run is known to solve it"
