"""`nano-rl checkpoints`: list, show, promote, and the best of a training."""

from __future__ import annotations

from pathlib import Path

import click

from nano_rl.commands.session import checkpoint_target, log_option, trainings_dir
from nano_shared.checkpoint import (
    checkpoint_names,
    latest_checkpoint,
    promote,
    read_checkpoint,
    resolve_checkpoint,
)  # fmt: skip


@click.group("checkpoints")
def command() -> None:
    """List checkpoints, show one, promote one, make one of a training's best state."""


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


@command.command("best")
@click.argument("training")
@click.option("--as", "name", required=True, help="Name of the checkpoint to write.")
@log_option
def best(training: str, name: str, log: str | None) -> int:
    """Make a checkpoint of the best state that TRAINING has saved, also when it was stopped short."""
    from nano_rl.best import save_best
    from nano_shared.store import LogStore

    target = checkpoint_target(name)
    with LogStore.open(log) as store:
        print(save_best(trainings_dir() / training, target, store).model_dump_json(indent=2))
    return 0
