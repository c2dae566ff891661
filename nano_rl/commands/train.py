"""`nano-rl train`: policy gradients on fresh rollouts, on the log, or on both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nano_rl.commands.config_options import ConfigCommand, Settings, config_options
from nano_rl.commands.options import log_option, model_option, name_option, reward_option
from nano_rl.config import TrainConfig
from nano_shared.errors import UsageError

if TYPE_CHECKING:
    from nano_coder.runtime import OpenedWeights, Runtime
    from nano_rl.gather import Sources
    from nano_rl.rewards import Reward
    from nano_rl.watch.watcher import Watcher
    from nano_shared.types import Task

HEADINGS = {
    "What to train on": ("name", "model", "tasks_file", "from_logs", "fresh", "log"),
    "Rollouts": ("steps", "prompts_per_step", "group_size", "temperature", "scheduler", "seed"),
    "Objective": ("objective", "updates_per_step", "minibatches"),
    "Imitation beside it": ("lambda_sft", "imitate"),
    "Optimizer": ("optimizer", "lora_rank", "dtype", "max_tokens"),
    "Reward": ("reward", "shuffle_rewards", "controls"),
    "Curriculum and refill": ("curriculum", "refill"),
    "Guards": ("guards",),
    "Saving": ("resume", "save_every", "keep_states"),
    "Watching": ("log_to", "as_json"),
    "Settings": ("config_file", "print_config"),
}
"""where fields and sections stand in the help; one that is not named here stands under its section's name"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is trained on what: the arguments beside the config."""

    name: str
    model: str | None
    tasks: Path | None
    from_logs: bool
    fresh: int
    curriculum: bool
    log: str | None

    def check(self) -> None:
        """Raises UsageError where the arguments contradict each other."""
        if self.from_logs == (self.tasks is not None):
            raise UsageError(
                "give either --tasks FILE, or --from-logs (with --fresh G to add fresh rollouts)"
            )
        if self.curriculum and self.from_logs:
            raise UsageError(
                "--curriculum chooses among tasks to roll out; give --tasks FILE instead of --from-logs"
            )


@click.command("train", cls=ConfigCommand, headings=HEADINGS)
@name_option
@model_option
@click.option("--tasks", "tasks_file", type=click.Path(path_type=Path), help="Tasks to roll out afresh.")
@click.option("--from-logs", is_flag=True, help="Train on the runs in the log.")
@click.option(
    "--fresh",
    type=click.IntRange(0),
    default=0,
    metavar="INT",
    show_default=True,
    help="With --from-logs: fresh rollouts added to each group.",
)
@click.option(
    "--curriculum",
    is_flag=True,
    help="With --tasks: draw levels and views by their success, which is held between 20 and 80 %.",
)
@reward_option
@log_option
@click.option(
    "--log-to",
    metavar="NAME,...",
    default="",
    help="Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON at the end, and nothing else.")
@config_options(TrainConfig, aliases={"prompts_per_step": ("--prompts",)}, apart=("reward",))
def command(
    name: str, model: str | None, tasks_file: Path | None, from_logs: bool, fresh: int, curriculum: bool,
    reward: str | None, log: str | None, log_to: str, as_json: bool, settings: Settings[TrainConfig],
) -> int:  # fmt: skip
    """Train and write checkpoint NAME: --tasks FILE rolls out afresh, --from-logs learns from the log.

    With --resume, what is not given is what the training was started with.
    """
    asked = Asked(
        name=name, model=model, tasks=tasks_file, from_logs=from_logs, fresh=fresh, curriculum=curriculum,
        log=log,
    )  # fmt: skip
    if name and settings.values.get("resume"):
        asked, settings = _resumed(asked, settings)
    config = _config(settings, reward, asked.fresh if asked.from_logs else None)
    asked.check()
    _train(asked, config, log_to=[n.strip() for n in log_to.split(",") if n.strip()], quiet=as_json)
    return 0


def _resumed(asked: Asked, settings: Settings[TrainConfig]) -> tuple[Asked, Settings[TrainConfig]]:
    """The same, over what the training was last started with."""
    from nano_rl.commands.session import trainings_dir
    from nano_rl.watch.record import read_record

    record = read_record(trainings_dir() / asked.name)
    if record is None:
        if asked.tasks is None and not asked.from_logs:
            raise UsageError(f"there is no training {asked.name} to resume; leave --resume out to start one")
        return asked, settings
    filled = replace(asked, model=asked.model or record.model, log=asked.log or record.reachable_log)
    if asked.tasks is None and not asked.from_logs:
        tasks = Path(record.tasks) if record.tasks else None
        filled = replace(filled, tasks=tasks, from_logs=record.from_logs)
        filled = replace(filled, fresh=asked.fresh or record.fresh, curriculum=record.curriculum)
    return filled, settings.over(record.config)


def _config(settings: Settings[TrainConfig], reward: str | None, fresh: int | None) -> TrainConfig:
    """The settings; with --from-logs the group size is what is added to each logged group."""
    more: dict[str, Any] = {}
    if reward:
        from nano_rl.rewards import parse_reward

        more["reward"] = parse_reward(reward).model_dump()
    if fresh is not None:
        return settings.config({**more, "group_size": fresh})
    config = settings.config(more)
    if config.group_size == 0:
        raise UsageError("--group-size 0 leaves nothing to train on; use --from-logs, or 2 or more")
    return config


def _train(asked: Asked, config: TrainConfig, *, log_to: list[str], quiet: bool) -> None:
    """Open what is needed, cheapest refusals first; train, watched; write the checkpoint."""
    from nano_rl.commands.session import training_folder, training_runtime
    from nano_rl.rewards import open_reward
    from nano_rl.tasks import read_tasks
    from nano_rl.watch.sinks import open_sinks

    composed = open_reward(config.reward) if config.reward else None
    tasks = tuple(read_tasks(asked.tasks)) if asked.tasks else ()
    target, folder = training_folder(asked.name)
    sinks = open_sinks(log_to, name=asked.name, folder=folder, settings=config.model_dump(mode="json"))
    opened, parent, runtime = training_runtime(
        asked.model, asked.log, dtype=config.dtype, temperature=config.temperature
    )

    from nano_coder.runtime import quiet_transformers
    from nano_rl.checkpoint import save_checkpoint
    from nano_rl.learner import prepare
    from nano_rl.metrics import METRICS, read_metrics
    from nano_rl.train import train
    from nano_rl.watch.live import NoView, open_view
    from nano_rl.watch.watcher import Watcher

    sources = _sources(asked, tasks, config, opened, runtime, composed, quiet=quiet)
    _record(asked, config, folder, parent, opened, runtime)
    trained = prepare(opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed)
    earlier = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
    view = NoView() if quiet else open_view(asked.name, config.steps, earlier)
    with Watcher(folder, view, sinks, done=len(earlier)) as watch:
        used = train(
            trained, opened, runtime, sources, config, folder, watch.on_step, watch.on_run,
            reward=composed, on_groups=watch.on_groups,
        )  # fmt: skip
    rewards = {k: v for k, v in watch.last.items() if k.startswith("reward")}
    with quiet_transformers():
        save_checkpoint(
            target, trained, opened, parent=parent, config=config, steps=config.steps, run_ids=used,
            tasks=sources.every_task, metrics=rewards,
        )  # fmt: skip
    _tell(target, folder, watch, quiet=quiet)


def _sources(
    asked: Asked,
    tasks: tuple[Task, ...],
    config: TrainConfig,
    opened: OpenedWeights,
    runtime: Runtime,
    composed: Reward | None,
    *,
    quiet: bool,
) -> Sources:
    """Where groups come from. Raises UsageError where the log can teach nothing."""
    from nano_rl.curriculum import Curriculum
    from nano_rl.gather import Sources
    from nano_rl.second_look import SecondLook
    from nano_rl.source import admit, report

    if not asked.from_logs:
        return Sources(tasks=tasks, curriculum=Curriculum(tasks, config.seed) if asked.curriculum else None)
    look = SecondLook(opened, runtime.store)
    admission = admit(
        runtime.store,
        opened.profile,
        look.template_hash,
        look=look,
        rescore=(lambda runs: composed.apply(runs, runtime)) if composed else None,
    )
    if not quiet:
        click.echo(report(admission), err=True)
    if not admission.groups:
        raise UsageError("the log holds no group that can train this policy; nano-rl rollout adds some")
    return Sources(logged=admission.groups)


def _record(
    asked: Asked, config: TrainConfig, folder: Path, model: str, opened: OpenedWeights, runtime: Runtime
) -> None:
    """Keep what was asked, and the tokenizer, for --resume and `nano-rl report`."""
    import time

    from nano_coder.runtime import runtime_version
    from nano_rl.watch.record import TOKENIZER, TrainingRecord

    TrainingRecord(
        name=asked.name,
        model=model,
        tasks=str(asked.tasks.resolve()) if asked.tasks else None,
        from_logs=asked.from_logs,
        fresh=asked.fresh,
        curriculum=asked.curriculum,
        log=runtime.store.url,
        config=config.model_dump(mode="json"),
        nano=runtime_version,
        started=time.time(),
    ).write(folder)
    backend = getattr(opened.loaded.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(folder / TOKENIZER))


def _tell(target: Path, folder: Path, watch: Watcher, *, quiet: bool) -> None:
    import json
    import math

    from nano_rl.commands.progress import print_metrics
    from nano_rl.metrics import METRICS, read_metrics

    if quiet:
        last = {name: value if math.isfinite(value) else None for name, value in watch.last.items()}
        print(json.dumps({"checkpoint": str(target), "metrics": last}))
        return
    print_metrics(read_metrics(folder / METRICS))
    print(target)
