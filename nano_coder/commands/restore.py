"""`nano-coder restore`: the workspace as a step of a run left it, in a directory of its own."""

from __future__ import annotations

from pathlib import Path

import click

from nano_coder.agent.workspace import workspace_after
from nano_shared import snapshot
from nano_shared.errors import UsageError
from nano_shared.store import LogStore


@click.command("restore")
@click.argument("run")
@click.option(
    "--at", "step", type=int, required=True, metavar="STEP", help="As `log show` counts them; 0 is the start."
)
@click.option(
    "--to", "directory", type=click.Path(path_type=Path), required=True, metavar="DIR",
    help="Where to write it: a directory that is new or empty.",
)  # fmt: skip
@click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
def command(run: str, step: int, directory: Path, log: str | None) -> int:
    """Write the workspace as it was after STEP of RUN to DIR. Version control and caches are in no log."""
    store = LogStore.open(log, create=False)
    workspace = workspace_after(store.get(run), step)
    if directory.is_symlink() or directory.exists():
        if not directory.is_dir():
            raise UsageError(f"{directory} is not a directory; --to names a new or empty one")
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty; --to names a new or empty directory")
    snapshot.materialise(workspace, store.blobs, directory)
    return 0
