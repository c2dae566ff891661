"""`nano-rl dpo`: from preference pairs to the policy."""

from __future__ import annotations

from pathlib import Path

import click

from nano_rl.commands.config_options import ConfigCommand, Settings, config_options
from nano_rl.commands.options import log_option, model_option, name_option
from nano_rl.commands.pairs import PAIR_OPTIONS, pair_options
from nano_rl.preferences.config import DpoConfig

HEADINGS = {
    "What to train on": ("name", "model", *PAIR_OPTIONS),
    "Loss": ("loss", "beta", "label_smoothing", "length_normalised", "lambda_sft"),
    "Optimizer": ("optimizer", "epochs", "batch", "lora_rank", "dtype", "max_tokens", "seed"),
    "Saving": ("save_every",),
    "Settings": ("config_file", "print_config"),
}


@click.command("dpo", cls=ConfigCommand, headings=HEADINGS)
@name_option
@model_option
@pair_options
@log_option
@config_options(DpoConfig)
def command(
    name: str,
    model: str | None,
    pairs_file: Path | None,
    from_logs: bool,
    log: str | None,
    settings: Settings[DpoConfig],
) -> int:
    """Train on preference pairs and write checkpoint NAME: --pairs FILE, or --from-logs."""
    config = settings.config()
    from nano_coder.models.opening import default_model, open_weights
    from nano_rl.checkpoints.checkpoint import save_checkpoint
    from nano_rl.commands.pairs import open_pairs, trained_runs, trained_tasks
    from nano_rl.commands.progress import bar, print_metrics
    from nano_rl.commands.session import training_folder
    from nano_rl.learn.metrics import METRICS, read_metrics
    from nano_rl.learn.model.learner import prepare
    from nano_rl.preferences.dpo import train_dpo

    target, folder = training_folder(name)
    parent = model or default_model()
    opened = open_weights(parent, dtype=config.dtype, merge=False)
    pairs = open_pairs(opened, pairs_file, from_logs, log, seed=config.seed)
    trained = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
    last: dict[str, float] = {}
    with bar("preferences", 1) as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            last.update(values)
            progress.reach(done, total, f"accuracy {values['accuracy']:.2f}  margin {values['margin']:.3f}")

        steps = train_dpo(trained, pairs, config, folder, on_step)
    kept = ("loss", "accuracy", "margin")
    save_checkpoint(
        target, trained, opened, parent=parent, config=config, steps=steps, run_ids=trained_runs(pairs),
        tasks=trained_tasks(pairs), metrics={k: v for k, v in last.items() if k in kept},
    )  # fmt: skip
    print_metrics(read_metrics(folder / METRICS))
    print(target)
    return 0
