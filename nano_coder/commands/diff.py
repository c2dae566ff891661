"""`nano-coder diff`: what a run changed."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Option

from nano_coder.agent.workspace import workspace_after
from nano_coder.commands.options import Log, RunArgument, open_log
from nano_shared import snapshot
from nano_shared.printable import printable


def command(
    run: RunArgument,
    step: Annotated[
        int | None,
        Option("--at", metavar="STEP", help="As it was after this step, as `log show` counts them."),
    ] = None,
    log: Log = None,
) -> int:
    """Print the unified diff of RUN against the workspace it started from."""
    store = open_log(log)
    trajectory = store.get(run)
    text = trajectory.diff
    # a run that was killed left steps, but no diff
    if step is not None or (trajectory.stop is None and trajectory.snapshot):
        start, then = (workspace_after(trajectory, at) for at in (0, step))
        text = snapshot.diff(start, then, store.blobs)
    if trajectory.directory is not None:
        print(f"changes to {printable(trajectory.directory)}", file=sys.stderr)
    if sys.stdout.isatty():
        print(printable(text, None), end="")
    else:  # a pipe gets it exactly, for `git apply`
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    return 0
