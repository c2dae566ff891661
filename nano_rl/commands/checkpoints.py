"""`nano-rl checkpoints`: list, show, promote."""

from __future__ import annotations

from pathlib import Path

import click

from nano_shared.checkpoint import (
    checkpoint_names,
    latest_checkpoint,
    promote,
    read_checkpoint,
    resolve_checkpoint,
)  # fmt: skip


@click.group("checkpoints")
def command() -> None:
    """List checkpoints, show one, promote one."""


@command.command("list")
def list_checkpoints() -> int:
    """Every checkpoint; the promoted one is marked."""
    latest = latest_checkpoint()
    for name in checkpoint_names():
        print(f"{name}{'  (promoted)' if latest and latest.name == name else ''}")
    return 0


@command.command("show")
@click.argument("name")
def show(name: str) -> int:
    """The manifest of a checkpoint, its files verified."""
    print(read_checkpoint(Path(resolve_checkpoint(name))).model_dump_json(indent=2))
    return 0


@command.command("promote")
@click.argument("name")
def promote_checkpoint(name: str) -> int:
    """Make NAME the model that nano-coder runs when none is named."""
    print(promote(name))
    return 0
