"""`nano-rl tasks import` and `export`: tasks of other projects, in and out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from nano_coder.commands.options import open_log
from nano_formats.row_format import find_format, guess_format
from nano_rl.commands.options import Log, TaskFile
from nano_rl.task_formats import FORMATS, ReadOptions
from nano_rl.tasks.task_file import read_tasks, refuse_unwritable, write_tasks
from nano_shared.errors import Refusal, UsageError
from nano_shared.extension_points import call_extension

_FORMATS = ", ".join(FORMATS)
KeepGoing = Annotated[
    bool, Option("--keep-going", help="List every refusal and write the rest; exits with 2.")
]


def import_tasks(
    source: Annotated[Path, Argument(metavar="SOURCE", help="A file or a folder.")],
    name: Annotated[
        str | None, Option("--from", help=f"Format, if not by what is there: {_FORMATS}.")
    ] = None,
    out: Annotated[Path | None, Option(help="If not SOURCE.tasks.jsonl.")] = None,
    repo: Annotated[Path | None, Option(help="Of swe-bench rows: a git repository.")] = None,
    log: Log = None,
    keep_going: KeepGoing = False,
) -> int:
    """Read SOURCE, a file or a folder, into a task file. Nothing is left out in silence."""
    format = find_format(name) if name else guess_format(source)
    target = out or source.with_name(f"{Path(os.path.realpath(source)).name}.tasks.jsonl")
    refuse_unwritable(target, source)
    blobs = open_log(log, create=True).blobs if repo is not None else None
    options = ReadOptions(repo=repo, blobs=blobs)
    found = call_extension(
        lambda: list(format.read(source, options)), name=f"format {format.name}", of=format, error=UsageError
    )
    refusals = [item for item in found if isinstance(item, Refusal)]
    tasks = [item for item in found if not isinstance(item, Refusal)]
    if not keep_going:
        _refuse_first(refusals)
    if not found:
        raise UsageError(f"{source}: holds no task of the format {format.name}")
    if tasks:
        write_tasks(target, tasks)
    ungraded = sum(task.hidden is None and task.check is None for task in tasks)
    note = f"{ungraded} of them without a check that can be computed here" if ungraded else ""
    return _report(target, len(tasks), refusals, note)


def export_tasks(
    file: TaskFile,
    name: Annotated[str, Option("--to", help=f"Format: {_FORMATS}.")],
    out: Annotated[Path, Option(help="File, or folder of folders.")],
    keep_going: KeepGoing = False,
) -> int:
    """Write the tasks of FILE in another format. What the format cannot carry is refused by name."""
    format, tasks = find_format(name), read_tasks(file)
    if out.is_file():
        refuse_unwritable(out, file)
    named: dict[str, Any] = {"name": f"format {format.name}", "of": format, "error": UsageError}
    refusals = call_extension(format.refusals, tasks, **named)
    if not keep_going:
        _refuse_first(refusals)
    refused = {refusal.where for refusal in refusals}
    carried = [task for task in tasks if task.key not in refused]
    if carried:
        call_extension(format.write, carried, out, **named)
    return _report(out, len(carried), refusals)


def _refuse_first(refusals: Sequence[Refusal]) -> None:
    """Raises UsageError with the first refusal and the number of others; does nothing if there are none."""
    if refusals:
        more = f" (and {len(refusals) - 1} more; --keep-going lists them)" if len(refusals) > 1 else ""
        raise UsageError(f"{refusals[0]}{more}")


def _report(target: Path, written: int, refusals: Sequence[Refusal], note: str = "") -> int:
    for refusal in refusals:
        print(f"refused: {refusal}", file=sys.stderr)
    counts = f"{written} tasks written" + (f", {note}" if note else "")
    print(counts + (f", {len(refusals)} refused" if refusals else ""), file=sys.stderr)
    if written:
        print(target)
    return 2 if refusals else 0
