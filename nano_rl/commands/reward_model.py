"""`nano-rl reward-model`: which of two runs people would prefer, learned from pairs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nano_rl.commands.config_options import ConfigCommand, Settings, config_options
from nano_rl.commands.options import log_option, model_option, name_option
from nano_rl.commands.pairs import PAIR_OPTIONS, pair_options
from nano_rl.preferences.config import RewardModelConfig

if TYPE_CHECKING:
    from nano_rl.preferences.reward_model import RewardModelReport as Report

HEADINGS = {
    "What to train on": ("name", "model", *PAIR_OPTIONS, "held_out"),
    "Optimizer": ("optimizer", "epochs", "batch", "lora_rank", "dtype", "max_tokens", "seed"),
    "Saving": ("save_every",),
    "Settings": ("config_file", "print_config"),
}


@click.command("reward-model", cls=ConfigCommand, headings=HEADINGS)
@name_option
@model_option
@pair_options
@log_option
@config_options(RewardModelConfig)
def command(
    name: str,
    model: str | None,
    pairs_file: Path | None,
    from_logs: bool,
    log: str | None,
    settings: Settings[RewardModelConfig],
) -> int:
    """Train a reward model on the backbone of --model; --reward preference:NAME=1 then uses it."""
    config = settings.config()
    from nano_rl.preferences.reward_checkpoint import CALIBRATION
    from nano_rl.report.page import calibration_page
    from nano_rl.report.plot import Plotter

    plotter = Plotter()  # it refuses before the training, not after
    from nano_coder.models.opening import default_model, open_weights
    from nano_rl.commands.pairs import open_pairs, trained_runs, trained_tasks
    from nano_rl.commands.progress import bar
    from nano_rl.commands.session import training_folder
    from nano_rl.learn.model.scalar_model import scalar_model
    from nano_rl.preferences.reward_checkpoint import save_reward_model
    from nano_rl.preferences.reward_model import held_out, measure, train_reward_model

    target, folder = training_folder(name)
    parent = model or default_model()
    opened = open_weights(parent, dtype=config.dtype, merge=False)
    pairs = open_pairs(opened, pairs_file, from_logs, log, seed=config.seed)
    train, kept = held_out(pairs, config.held_out, config.seed)
    scalar = scalar_model(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed, bias=False)
    with bar("reward model", 1) as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            progress.reach(done, total, f"loss {values['loss']:.3f}  accuracy {values['accuracy']:.2f}")

        steps = train_reward_model(scalar, train, config, folder, on_step)
    report = measure(scalar, kept, max_tokens=config.max_tokens)
    save_reward_model(
        target, scalar, opened, parent=parent, config=config, steps=steps, run_ids=trained_runs(train),
        tasks=trained_tasks(train), report=report, page=calibration_page(name, report, plotter),
    )  # fmt: skip
    _show(report)
    print(target / CALIBRATION)
    print(target)
    return 0


def _show(report: Report) -> None:
    """Accuracy and calibration on held-out pairs, on stderr."""
    from rich.table import Table

    from nano_shared.console import Console

    title = (
        f"{report.pairs} held-out pairs: accuracy {report.accuracy:.1%}, log loss {report.log_loss:.3f},"
        f" expected calibration error {report.calibration_error:.3f}"
    )
    table = Table("sure by", "pairs", "mean confidence", "right", box=None, title=title)
    for one in report.bins:
        table.add_row(
            f"{one.low:.0%} to {one.high:.0%}", str(one.pairs), f"{one.confidence:.1%}", f"{one.accuracy:.1%}"
        )
    Console(stderr=True).print(table)
