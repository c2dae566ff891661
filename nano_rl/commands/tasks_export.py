"""`nano-rl tasks export`: a task file in the formats of others."""

from __future__ import annotations

from pathlib import Path

import click

from nano_rl.commands.progress import report
from nano_rl.formats import FORMATS, find_format
from nano_rl.tasks.make import read_tasks
from nano_shared.refusal import first_problem


@click.command("export")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--to", "name", metavar="FORMAT", required=True, help=f"{', '.join(FORMATS)}, or path.py:name."
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File, or folder of folders.")
@click.option("--keep-going", is_flag=True, help="List every refusal and write the rest; exits with 2.")
def command(file: Path, name: str, out: Path, keep_going: bool) -> int:
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
