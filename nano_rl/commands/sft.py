"""`nano-rl sft`: imitate the oracles of a task file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from nano_rl.commands.oracles import oracle_runs
from nano_rl.commands.progress import bar, print_metrics
from nano_rl.commands.session import (
    dtype_option,
    log_option,
    model_option,
    name_option,
    seed_option,
    training_folder,
    training_runtime,
)  # fmt: skip
from nano_rl.config import SftConfig, parse_config
from nano_rl.metrics import METRICS, read_metrics
from nano_rl.tasks import read_tasks


@click.command("sft")
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), required=True)
@name_option
@model_option
@click.option("--epochs", type=float, default=1.0, show_default=True)
@click.option("--stop-after", type=int, help="Steps after which to stop short of the schedule.")
@click.option("--batch", type=int, default=16, show_default=True, help="Trajectories an optimizer step.")
@click.option("--learning-rate", type=float, default=1e-3, show_default=True)
@click.option("--lora-rank", type=int, default=16, show_default=True, help="0 trains all weights.")
@click.option("--max-tokens", type=int, default=1500, show_default=True, help="Positions of a micro-batch.")
@seed_option
@dtype_option
@log_option
def command(
    tasks_file: Path, name: str, model: str | None, epochs: float, stop_after: int | None, batch: int,
    learning_rate: float, lora_rank: int, max_tokens: int, seed: int, dtype: str, log: str | None,
) -> int:  # fmt: skip
    """Run the oracles of a task file through the runtime, imitate them, and write checkpoint NAME."""
    optimizer = {"learning_rate": learning_rate, "schedule": "linear", "warmup_steps": 10}
    config = parse_config(
        SftConfig,
        {
            "epochs": epochs,
            "stop_after": stop_after,
            "batch": batch,
            "lora_rank": lora_rank,
            "max_tokens": max_tokens,
            "seed": seed,
            "dtype": dtype,
            "optimizer": optimizer,
        },
    )
    tasks = read_tasks(tasks_file)
    target, folder = training_folder(name)
    opened, parent, runtime = training_runtime(model, log, dtype=dtype, temperature=1.0)
    runs = oracle_runs(tasks, replace(runtime, policy_name="oracle"))

    from nano_coder.runtime import local_policy
    from nano_rl.checkpoint import save_checkpoint
    from nano_rl.imitation import imitation_sample
    from nano_rl.learner import prepare
    from nano_rl.sft import train_sft

    template = local_policy(opened.loaded, opened.profile).template
    eos = opened.loaded.tokenizer.eos_token_id
    samples = [imitation_sample(run, opened.profile, template, eos) for run in runs]
    trained = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
    last: dict[str, float] = {}
    with bar("imitation", 1) as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            last.update(values)
            progress.reach(
                done, total, f"loss {values['loss']:.3f}  {values['tokens_per_second']:.0f} tokens/s"
            )

        steps = train_sft(trained, samples, config, folder, on_step)
    save_checkpoint(
        target, trained, opened, parent=parent, config=config, steps=steps,
        run_ids=[run.id for run in runs], tasks=tasks, metrics={"loss": last.get("loss", 0.0)},
    )  # fmt: skip
    print_metrics(read_metrics(folder / METRICS))
    print(target)
    return 0
