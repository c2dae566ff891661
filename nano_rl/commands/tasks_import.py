"""`nano-rl tasks import`: tasks in the formats of others, as a task file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from nano_coder.commands.options import open_log
from nano_rl.commands.options import KeepGoing, Log
from nano_rl.commands.progress import report
from nano_rl.formats import FORMATS, Refusal, find_format, guess_format
from nano_rl.formats.row_format import ReadOptions
from nano_rl.tasks.make import write_tasks
from nano_shared.errors import UsageError
from nano_shared.refusal import first_problem


def command(
    source: Annotated[Path, Argument(metavar="SOURCE", help="A file or a folder.")],
    name: Annotated[
        str | None, Option("--from", help=f"Format, if not by what is there: {', '.join(FORMATS)}.")
    ] = None,
    out: Annotated[Path | None, Option(help="If not SOURCE.tasks.jsonl.")] = None,
    repo: Annotated[Path | None, Option(help="Of swe-bench rows: a git repository.")] = None,
    log: Log = None,
    keep_going: KeepGoing = False,
) -> int:
    """Read SOURCE, a file or a folder, into a task file. Nothing is left out in silence."""
    format = find_format(name) if name else guess_format(source)
    blobs = open_log(log, create=True).blobs if repo is not None else None
    found = list(format.read(source, ReadOptions(repo=repo, blobs=blobs)))
    refusals = [item for item in found if isinstance(item, Refusal)]
    tasks = [item for item in found if not isinstance(item, Refusal)]
    if not keep_going:
        first_problem(refusals)
    if not found:
        raise UsageError(f"{source}: holds no task of the format {format.name}")
    target = out or source.with_name(f"{Path(os.path.realpath(source)).name}.tasks.jsonl")
    if tasks:
        write_tasks(target, tasks)
    ungraded = sum(task.hidden is None and task.check is None for task in tasks)
    note = f"{ungraded} of them without a check that can be computed here" if ungraded else ""
    return report(target, len(tasks), refusals, note)
