"""`nano-rl train`: policy gradients on fresh rollouts, on the log, or on both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from nano_rl.commands.progress import bar, print_metrics
from nano_rl.commands.session import (
    dtype_option,
    log_option,
    model_option,
    name_option,
    reward_option,
    seed_option,
    training_folder,
    training_runtime,
)  # fmt: skip
from nano_rl.config import TrainConfig, parse_config
from nano_rl.metrics import METRICS, read_metrics
from nano_rl.rewards import open_reward, parse_reward
from nano_rl.tasks import read_tasks
from nano_shared.errors import UsageError


@click.command("train")
@name_option
@model_option
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), help="Tasks to roll out afresh.")
@click.option("--from-logs", is_flag=True, help="Train on the runs in the log.")
@click.option(
    "--fresh",
    type=int,
    default=0,
    show_default=True,
    help="With --from-logs: fresh rollouts added to each group.",
)
@click.option(
    "--curriculum",
    is_flag=True,
    help="With --tasks: draw levels and views by their success, which is held between 20 and 80 %.",
)
@click.option("--steps", type=int, default=40, show_default=True)
@click.option("--prompts", type=int, default=8, show_default=True, help="Tasks a step.")
@click.option("--group-size", type=int, default=8, show_default=True, help="Rollouts of each task.")
@click.option("--learning-rate", type=float, default=1e-4, show_default=True)
@click.option("--lora-rank", type=int, default=0, show_default=True, help="0 trains all weights.")
@click.option("--temperature", type=float, default=1.0, show_default=True)
@click.option("--max-tokens", type=int, default=16384, show_default=True, help="Positions of a micro-batch.")
@click.option("--beta", type=float, default=0.0, show_default=True, help="Weight of the KL to the start.")
@click.option("--std", type=click.Choice(["none", "sample", "population"]), default="none", show_default=True)
@reward_option
@click.option(
    "--normalise",
    type=click.Choice(["sum", "each"]),
    default="sum",
    show_default=True,
    help="Compare the reward's parts summed, or each apart (with --std).",
)
@click.option("--discount", type=float, help="Credit each turn with its discounted return.")
@click.option(
    "--controls",
    type=float,
    default=0.0,
    show_default=True,
    help="Impossible rollouts for each ordinary one, to measure hacking.",
)
@click.option("--tis-cap", type=float, default=2.0, show_default=True, help="Largest importance weight.")
@click.option("--shuffle-rewards", is_flag=True, help="Negative control: nothing can be learned.")
@seed_option
@dtype_option
@log_option
def command(
    name: str,
    model: str | None,
    tasks_file: Path | None,
    from_logs: bool,
    fresh: int,
    curriculum: bool,
    log: str | None,
    reward: str | None,
    **flags: Any,
) -> int:
    """Train and write checkpoint NAME: --tasks FILE rolls out afresh, --from-logs learns from the log."""
    if from_logs == (tasks_file is not None):
        raise UsageError("give either --tasks FILE, or --from-logs (with --fresh G to add fresh rollouts)")
    if curriculum and from_logs:
        raise UsageError(
            "--curriculum chooses among tasks to roll out; give --tasks FILE instead of --from-logs"
        )
    described = {"reward": parse_reward(reward)} if reward else {}
    config = parse_config(TrainConfig, {**_settings(flags, from_logs, fresh), **described})
    composed = open_reward(config.reward) if config.reward else None
    tasks = tuple(read_tasks(tasks_file)) if tasks_file else ()
    target, folder = training_folder(name)
    opened, parent, runtime = training_runtime(model, log, dtype=config.dtype, temperature=config.temperature)

    from nano_coder.runtime import local_policy
    from nano_rl.checkpoint import save_checkpoint
    from nano_rl.curriculum import Curriculum
    from nano_rl.gather import Sources
    from nano_rl.learner import prepare
    from nano_rl.source import admit, report
    from nano_rl.train import train

    sources = Sources(tasks=tasks, curriculum=Curriculum(tasks, config.seed) if curriculum else None)
    if from_logs:
        admission = admit(
            runtime.store,
            opened.profile,
            local_policy(opened.loaded, opened.profile).template_hash,
            rescore=(lambda runs: composed.apply(runs, runtime)) if composed else None,
        )
        print(report(admission), file=sys.stderr)
        if not admission.groups:
            raise UsageError("the log holds no group that can train this policy; nano-rl rollout adds some")
        sources = Sources(logged=admission.groups)
    trained = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
    last: dict[str, float] = {}
    with bar("training", config.steps) as progress:

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            last.update(values)
            progress.reach(done, total, f"reward {values.get('reward_mean', float('nan')):.2f}")

        used = train(trained, opened, runtime, sources, config, folder, on_step, reward=composed)
    all_tasks = tasks or tuple(g.trajectories[0].task for g in sources.logged)
    save_checkpoint(
        target, trained, opened, parent=parent, config=config, steps=config.steps, run_ids=used,
        tasks=all_tasks, metrics={k: v for k, v in last.items() if k.startswith("reward")},
    )  # fmt: skip
    print_metrics(read_metrics(folder / METRICS))
    print(target)
    return 0


def _settings(flags: dict[str, Any], from_logs: bool, fresh: int) -> dict[str, Any]:
    names = ("beta", "std", "tis_cap", "normalise", "discount")
    objective = {name: flags.pop(name) for name in names}
    optimizer = {"learning_rate": flags.pop("learning_rate")}
    prompts, group_size = flags.pop("prompts"), flags.pop("group_size")
    size = fresh if from_logs else group_size
    if not from_logs and size == 0:
        raise UsageError("--group-size 0 leaves nothing to train on; use --from-logs, or 2 or more")
    return {
        **flags,
        "prompts_per_step": prompts,
        "group_size": size,
        "objective": objective,
        "optimizer": optimizer,
    }
