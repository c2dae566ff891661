"""`nano-coder undo`: take back what a run's changes did to a directory, or nothing at all."""

from __future__ import annotations

from pathlib import Path

import click

from nano_coder.commands.step import workspace_after, workspaces_since
from nano_coder.config import load_config
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.feedback import edited_workspace
from nano_shared.printable import printable
from nano_shared.store import LogStore


@click.command("undo")
@click.argument("run")
@click.option(
    "--to", "step", type=int, default=0, metavar="STEP",
    help="Take back only what came after this step, as `log show` counts them; 0, the start, unless given.",
)  # fmt: skip
@click.option(
    "-C", "directory", type=click.Path(path_type=Path), default=Path(), help="Where it was applied."
)
@click.option("--log", help="Path or SQLAlchemy URL of the log.")
def command(run: str, step: int, directory: Path, log: str | None) -> int:
    """Take back in DIR what applying RUN did; stops with the list of files that changed since, touching none.

    Files that the run did not change are left as they are, and so is a folder of the run's that holds some.
    """
    if not directory.is_dir():
        raise UsageError(f"no such directory: {directory}; -C names the directory to take changes back in")
    config, _ = load_config({"log": log}, directory)
    store = LogStore.open(config.log, create=False)
    trajectory = store.get(run)
    target = workspace_after(trajectory, step)
    edits = (edited_workspace(row) for row in reversed(store.feedback(trajectory.id)))
    stages = [*filter(None, edits), *workspaces_since(trajectory, step)]
    changed = snapshot.undo(stages, target, store.blobs, directory)
    for path in changed:
        print(printable(path))
    if not changed:
        click.echo("nothing to undo", err=True)
    return 0
