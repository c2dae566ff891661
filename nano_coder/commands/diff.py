"""`nano-coder diff`: what a run changed."""

from __future__ import annotations

import sys

import click

from nano_coder.agent.workspace import workspace_after
from nano_shared import snapshot
from nano_shared.printable import printable
from nano_shared.store import LogStore


@click.command("diff")
@click.argument("run")
@click.option(
    "--at", "step", type=int, metavar="STEP", help="As it was after this step, as `log show` counts them."
)
@click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
def command(run: str, step: int | None, log: str | None) -> int:
    """Print the unified diff of RUN against the workspace it started from."""
    store = LogStore.open(log, create=False)
    trajectory = store.get(run)
    text = trajectory.diff
    # a run that was killed left steps, but no diff
    if step is not None or (trajectory.stop is None and trajectory.snapshot):
        start, then = (workspace_after(trajectory, at) for at in (0, step))
        text = snapshot.diff(start, then, store.blobs)
    if trajectory.directory is not None:
        click.echo(f"changes to {printable(trajectory.directory)}", err=True)
    if sys.stdout.isatty():
        print(printable(text, None), end="")
    else:  # a pipe gets it exactly, for `git apply`
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    return 0
