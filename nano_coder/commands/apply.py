"""`nano-coder apply`: apply a run's changes, or nothing at all where something changed since."""

from __future__ import annotations

from pathlib import Path

import click

from nano_coder.commands.run import apply_to
from nano_coder.config import load_config
from nano_shared.errors import UsageError
from nano_shared.printable import printable
from nano_shared.store import LogStore


@click.command("apply")
@click.argument("run")
@click.option("-C", "directory", type=click.Path(path_type=Path), default=Path(), help="Where to apply.")
@click.option("--log", help="Path or SQLAlchemy URL of the log.")
def command(run: str, directory: Path, log: str | None) -> int:
    """Apply what RUN changed to DIR; stops with the list of files that changed since, touching none."""
    if not directory.is_dir():
        raise UsageError(f"no such directory: {directory}; -C names the directory to apply to")
    config, _ = load_config({"log": log}, directory)
    store = LogStore.open(config.log, create=False)
    changed = apply_to(store.get(run), directory, store)
    for path in changed:
        print(printable(path))
    if not changed:
        click.echo("nothing to apply", err=True)
    return 0
