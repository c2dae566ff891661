"""`nano-coder diff`: what a run changed."""

from __future__ import annotations

import sys

import click

from nano_shared.printable import printable
from nano_shared.store import LogStore


@click.command("diff")
@click.argument("run")
@click.option("--log", envvar="NANO_LOG", help="Path or SQLAlchemy URL of the log.")
def command(run: str, log: str | None) -> int:
    """Print the unified diff of RUN against the workspace it started from."""
    text = LogStore.open(log, create=False).get(run).diff
    # a pipe gets it exactly, for `git apply`
    print(printable(text) if sys.stdout.isatty() else text, end="")
    return 0
