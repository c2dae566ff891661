"""`nano-rl train`: policy gradients on fresh rollouts, on the log, or on both."""

from __future__ import annotations

from pathlib import Path

import click

from nano_rl.commands.config_options import ConfigCommand, Settings, config_options
from nano_rl.commands.options import log_option, model_option, name_option, reward_option
from nano_rl.config import TrainConfig
from nano_shared.errors import UsageError

HEADINGS = {
    "What to train on": ("name", "model", "tasks_file", "from_logs", "fresh", "log"),
    "Rollouts": ("steps", "prompts_per_step", "group_size", "temperature", "seed"),
    "Objective": ("objective",),
    "Optimizer": ("optimizer", "lora_rank", "dtype", "max_tokens"),
    "Reward": ("reward", "shuffle_rewards", "controls"),
    "Curriculum and refill": ("curriculum",),
    "Guards": ("guards",),
    "Saving": ("resume", "save_every"),
    "Settings": ("config_file", "print_config"),
}
"""where fields and sections stand in the help; one that is not named here stands under its section's name"""


@click.command("train", cls=ConfigCommand, headings=HEADINGS)
@name_option
@model_option
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), help="Tasks to roll out afresh.")
@click.option("--from-logs", is_flag=True, help="Train on the runs in the log.")
@click.option(
    "--fresh",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="With --from-logs: fresh rollouts added to each group.",
)
@click.option(
    "--curriculum",
    is_flag=True,
    help="With --tasks: draw levels and views by their success, which is held between 20 and 80 %.",
)
@reward_option
@click.option("--resume", is_flag=True, help="Go on with training NAME; an error where there is none.")
@log_option
@config_options(TrainConfig, aliases={"prompts_per_step": ("--prompts",)}, apart=("reward",))
def command(
    name: str,
    model: str | None,
    tasks_file: Path | None,
    from_logs: bool,
    fresh: int,
    curriculum: bool,
    reward: str | None,
    resume: bool,
    log: str | None,
    settings: Settings[TrainConfig],
) -> int:
    """Train and write checkpoint NAME: --tasks FILE rolls out afresh, --from-logs learns from the log."""
    config = _config(settings, reward, fresh if from_logs else None)
    if from_logs == (tasks_file is not None):
        raise UsageError("give either --tasks FILE, or --from-logs (with --fresh G to add fresh rollouts)")
    if curriculum and from_logs:
        raise UsageError(
            "--curriculum chooses among tasks to roll out; give --tasks FILE instead of --from-logs"
        )
    from nano_rl.commands.progress import bar, print_metrics
    from nano_rl.commands.session import training_folder, training_runtime
    from nano_rl.metrics import METRICS, read_metrics
    from nano_rl.rewards import open_reward
    from nano_rl.tasks import read_tasks

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
        click.echo(report(admission), err=True)
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


def _config(settings: Settings[TrainConfig], reward: str | None, fresh: int | None) -> TrainConfig:
    """The settings; with --from-logs the group size is what is added to each logged group."""
    from nano_rl.rewards import parse_reward

    more = {"reward": parse_reward(reward).model_dump()} if reward else {}
    if fresh is not None:
        return settings.config({**more, "group_size": fresh})
    config = settings.config(more)
    if config.group_size == 0:
        raise UsageError("--group-size 0 leaves nothing to train on; use --from-logs, or 2 or more")
    return config
