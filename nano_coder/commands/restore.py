"""`nano-coder restore`: the workspace as a step of a run left it, in a directory of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from nano_coder.agent.workspace import workspace_after
from nano_coder.commands.options import Log, RunArgument, open_log
from nano_shared import snapshot
from nano_shared.errors import UsageError


def command(
    run: RunArgument,
    step: Annotated[int, Option("--at", metavar="STEP", help="As `log show` counts them; 0 is the start.")],
    directory: Annotated[
        Path, Option("--to", metavar="DIR", help="Where to write it: a directory that is new or empty.")
    ],
    log: Log = None,
) -> int:
    """Write the workspace as it was after STEP of RUN to DIR. Version control and caches are in no log."""
    store = open_log(log)
    workspace = workspace_after(store.get(run), step)
    if directory.is_symlink() or directory.exists():
        if not directory.is_dir():
            raise UsageError(f"{directory} is not a directory; --to names a new or empty one")
        if any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty; --to names a new or empty directory")
    snapshot.materialise(workspace, store.blobs, directory)
    return 0
