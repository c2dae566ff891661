"""`nano-coder diff`: what a run changed."""

from __future__ import annotations

import click

from nano_coder.commands.display import printable
from nano_shared.store import LogStore


@click.command("diff")
@click.argument("run")
@click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
def command(run: str, log: str | None) -> int:
    """Print the unified diff of RUN against the workspace it started from."""
    print(printable(LogStore.open(log, create=False).get(run).diff), end="")
    return 0
