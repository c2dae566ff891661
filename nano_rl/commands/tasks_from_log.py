"""`nano-rl tasks from-log`: logged runs as tasks, each with the workspace, the prompt and a check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nano_rl.commands.options import log_option
from nano_rl.tasks.make import refuse_unwritable, write_tasks
from nano_shared.errors import UsageError
from nano_shared.printable import printable
from nano_shared.store import LogStore

if TYPE_CHECKING:
    from nano_rl.tasks.from_log import LoggedTask


@click.command("from-log")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--check", help="Shell line that grades the task and that no agent sees; else the run's own.")
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False),
    help="Write the rows to this file; else they go to standard output.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object that says what was made of each run.")
@log_option
def command(
    runs: tuple[str, ...], check: str | None, out: Path | None, as_json: bool, log: str | None
) -> int:
    """Make a task of each RUN (an id, the beginning of one, or `last`).

    The task begins in the workspace that the run began in. --check is run in a fresh jail on those files plus
    what an agent changed, with tests and configuration as they were. A run that passes gives the oracle.
    """
    from nano_coder.sandbox.backend import open_sandbox
    from nano_rl.tasks.from_log import distinct, task_from_run

    if check is not None and not check.strip():
        raise UsageError("--check is empty; give a shell line, or leave it out to keep the run's own check")
    if as_json and out is None:
        raise UsageError("--json prints what was made, so the rows need a file: name one with -o")
    store = LogStore.open(log, create=False)
    chosen = [store.get(run) for run in runs]
    sandbox = open_sandbox()
    if out is not None:
        refuse_unwritable(out)
    made = distinct([task_from_run(run, store.blobs, sandbox, check) for run in chosen])
    if out is None:
        for logged in made:
            print(logged.task.model_dump_json(exclude_defaults=True))
    else:
        write_tasks(out, [logged.task for logged in made])
    lines = []
    for logged in made:
        solved = _solved(logged)
        where = "" if logged.portable else "; its files stay in the blobs of this log"
        lines.append(
            f"{logged.task.key} from run {logged.run}: trust {logged.trust},"
            f" reward {logged.reward}; {solved}{where}"
        )
    if as_json:
        rows = [
            {
                "key": m.task.key, "run": m.run, "trust": m.trust, "reward": m.reward,
                "oracle": m.task.oracle is not None, "portable": m.portable, "failure_kind": m.failure_kind,
            }
            for m in made
        ]  # fmt: skip
        print(json.dumps({"tasks": rows, "file": str(out)}))
    else:
        click.echo(printable("\n".join(lines)), err=out is None)
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
