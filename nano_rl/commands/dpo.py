"""`nano-rl dpo`: from preference pairs to the policy."""

from __future__ import annotations

from nano_rl.commands.options import DeviceOption, Log, ModelOption, NameOption
from nano_rl.commands.pairs import FromLogs, Pairs
from nano_rl.config.training import DpoConfig
from nano_shared.command_line import JsonOption
from nano_shared.settings_options import Settings, settings_options

FLAGS = {
    "Learning": ("loss", "beta", "optimizer.learning_rate", "epochs", "lora_rank"),
}


@settings_options(DpoConfig, FLAGS)
def command(
    settings: Settings[DpoConfig],
    name: NameOption,
    model: ModelOption = None,
    device: DeviceOption = None,
    pairs: Pairs = None,
    from_logs: FromLogs = False,
    log: Log = None,
    as_json: JsonOption = False,
) -> int:
    """Train on preference pairs and write checkpoint NAME: --pairs FILE, or --from-logs."""
    config = settings.config()
    from nano_rl.commands.session import model_to_train, training_folder, weights_to_train

    parent = model_to_train(model)  # before torch is imported, which takes seconds
    from nano_rl.checkpoints.checkpoint import save_checkpoint
    from nano_rl.commands.pairs import open_pairs, trained_runs, trained_tasks
    from nano_rl.commands.progress import bar, print_trained
    from nano_rl.learn.model.learner import prepare
    from nano_rl.preferences.dpo import train_dpo

    target, folder = training_folder(name)
    opened = weights_to_train(parent, config.dtype, device, config.quantise)
    rows = open_pairs(opened, pairs, from_logs, log, seed=config.seed)
    trained = prepare(
        opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )  # fmt: skip
    last: dict[str, float] = {}
    with bar("preferences", 1) as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            last.update(values)
            progress.reach(done, total, f"accuracy {values['accuracy']:.2f}  margin {values['margin']:.3f}")

        steps = train_dpo(trained, rows, config, folder, on_step)
    kept = ("loss", "accuracy", "margin")
    save_checkpoint(
        target, trained, opened, parent=parent, config=config, steps=steps, run_ids=trained_runs(rows),
        tasks=trained_tasks(rows), metrics={k: v for k, v in last.items() if k in kept},
    )  # fmt: skip
    print_trained(target, folder, as_json=as_json)
    return 0
