"""`nano-coder undo`: take back what a run's changes did to a directory, or nothing at all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from nano_coder.agent.workspace import workspace_after, workspaces_since
from nano_coder.commands.apply import directory_of
from nano_coder.commands.options import Log, RunArgument, open_log
from nano_shared import snapshot
from nano_shared.feedback import edited_workspace
from nano_shared.printable import printable


def command(
    run: RunArgument,
    step: Annotated[
        int,
        Option(
            "--to",
            metavar="STEP",
            help="Take back only what came after this step, as `log show` counts them.",
        ),
    ] = 0,
    directory: Annotated[
        Path | None, Option("-C", metavar="DIR", help="Where it was applied, if not where the run was made.")
    ] = None,
    log: Log = None,
) -> int:
    """Take back what applying RUN did, in the directory that it was made in.

    Stops with the list of files that changed since, touching none. Files that the run did not change are left
    as they are, and so is a folder of the run's that holds some.
    """
    store = open_log(log, directory or Path())
    trajectory = store.get(run)
    place = directory_of(trajectory, directory)
    target = workspace_after(trajectory, step)
    edits = (edited_workspace(row) for row in reversed(store.feedback(trajectory.id)))
    stages = [*filter(None, edits), *workspaces_since(trajectory, step)]
    changed = snapshot.undo(stages, target, store.blobs, place)
    for path in changed:
        print(printable(path))
    if not changed:
        print(f"nothing to undo in {printable(str(place))}", file=sys.stderr)
    elif directory is None:
        print(f"taken back in {printable(str(place))}", file=sys.stderr)
    return 0
