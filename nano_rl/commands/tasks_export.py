"""`nano-rl tasks export`: a task file in the formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from nano_rl.commands.options import KeepGoing, TaskFile
from nano_rl.commands.progress import report
from nano_rl.formats import FORMATS, find_format
from nano_rl.tasks.make import read_tasks
from nano_shared.refusal import first_problem


def command(
    file: TaskFile,
    name: Annotated[str, Option("--to", help=f"Format: {', '.join(FORMATS)}.")],
    out: Annotated[Path, Option(help="File, or folder of folders.")],
    keep_going: KeepGoing = False,
) -> int:
    """Write the tasks of FILE in another format. What the format cannot carry is refused by name."""
    format, tasks = find_format(name), read_tasks(file)
    refusals = format.refusals(tasks)
    if not keep_going:
        first_problem(refusals)
    refused = {refusal.where for refusal in refusals}
    carried = [task for task in tasks if task.key not in refused]
    if carried:
        format.write(carried, out)
    return report(out, len(carried), refusals)
