"""`nano-rl tasks import`: tasks in the formats of others, as a task file."""

from __future__ import annotations

from pathlib import Path

import click

from nano_rl.commands.progress import report
from nano_rl.commands.session import log_option
from nano_rl.formats import FORMATS, Refusal, find_format, guess_format
from nano_rl.formats.row_format import ReadOptions
from nano_rl.tasks.make import write_tasks
from nano_shared.errors import UsageError
from nano_shared.refusal import first_problem
from nano_shared.store import LogStore


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--from", "name", metavar="FORMAT",
    help=f"{', '.join(FORMATS)}, or path.py:name; default: by what is there.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), help="Default: SOURCE.tasks.jsonl.")
@click.option("--repo", type=click.Path(path_type=Path), help="Of swe-bench rows: a git repository.")
@log_option
@click.option("--keep-going", is_flag=True, help="List every refusal and write the rest; exits with 2.")
def command(
    source: Path, name: str | None, out: Path | None, repo: Path | None, log: str | None, keep_going: bool
) -> int:
    """Read SOURCE, a file or a folder, into a task file. Nothing is left out in silence."""
    format = find_format(name) if name else guess_format(source)
    blobs = LogStore.open(log).blobs if repo is not None else None
    found = list(format.read(source, ReadOptions(repo=repo, blobs=blobs)))
    refusals = [item for item in found if isinstance(item, Refusal)]
    tasks = [item for item in found if not isinstance(item, Refusal)]
    if not keep_going:
        first_problem(refusals)
    if not found:
        raise UsageError(f"{source}: holds no task of the format {format.name}")
    target = out or source.with_name(f"{source.resolve().name}.tasks.jsonl")
    if tasks:
        write_tasks(target, tasks)
    ungraded = sum(task.hidden is None and task.check is None for task in tasks)
    note = f"{ungraded} of them without a check that can be computed here" if ungraded else ""
    return report(target, len(tasks), refusals, note)
