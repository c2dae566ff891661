"""`nano-coder undo`: take back what a run's changes did to a directory, or nothing at all."""

from __future__ import annotations

from pathlib import Path

import click

from nano_coder.agent.workspace import workspace_after, workspaces_since
from nano_coder.commands.apply import directory_of, open_log
from nano_shared import snapshot
from nano_shared.feedback import edited_workspace
from nano_shared.printable import printable


@click.command("undo")
@click.argument("run")
@click.option(
    "--to", "step", type=int, default=0, metavar="STEP",
    help="Take back only what came after this step, as `log show` counts them; 0, the start, unless given.",
)  # fmt: skip
@click.option(
    "-C", "directory", type=click.Path(path_type=Path),
    help="Where it was applied, if not where the run was made.",
)  # fmt: skip
@click.option("--log", help="Path or SQLAlchemy URL of the log.")
def command(run: str, step: int, directory: Path | None, log: str | None) -> int:
    """Take back what applying RUN did, in the directory that it was made in.

    Stops with the list of files that changed since, touching none. Files that the run did not change are left
    as they are, and so is a folder of the run's that holds some.
    """
    store = open_log(log, directory)
    trajectory = store.get(run)
    place = directory_of(trajectory, directory)
    target = workspace_after(trajectory, step)
    edits = (edited_workspace(row) for row in reversed(store.feedback(trajectory.id)))
    stages = [*filter(None, edits), *workspaces_since(trajectory, step)]
    changed = snapshot.undo(stages, target, store.blobs, place)
    for path in changed:
        print(printable(path))
    if not changed:
        click.echo(f"nothing to undo in {printable(str(place))}", err=True)
    elif directory is None:
        click.echo(f"taken back in {printable(str(place))}", err=True)
    return 0
