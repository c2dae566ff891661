"""`nano-rl train`: policy gradients on fresh rollouts, on the log, or on both."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from nano_coder.commands.options import Limit, Net, ToolOption, log_of_environment
from nano_coder.config import parse_limits
from nano_coder.views import TrainingView
from nano_rl.commands.options import (
    DeviceOption,
    EnvOption,
    ModelOption,
    NameOption,
    RewardOption,
)
from nano_rl.commands.training_arguments import FRESH, Asked, fresh_tasks, further_logs, open_sources
from nano_rl.config.training import TrainConfig, saved_settings
from nano_shared.command_line import JsonOption
from nano_shared.errors import UsageError
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights
    from nano_coder.run.execution import Runtime
    from nano_rl.sinks import Sink
    from nano_rl.watch import Watcher
    from nano_shared.store import LogStore

FLAGS = {
    "Rollouts": (
        "steps", "prompts_per_step", "group_size", "seed", "engine", "ray", "rollout_workers",
        "asynchronous", "objective.max_staleness",
    ),
    "Learning": ("objective.objective", "optimizer.learning_rate", "lora_rank"),
    "Settings": ("resume",),
}  # fmt: skip
"""the settings that are options too, by panel of the help; the others are reached by --config and --set"""
NAMES = {
    "prompts_per_step": "--prompts", "asynchronous": "--async",
    "objective.max_staleness": "--max-off-policy-steps",
}  # fmt: skip
_FROM_LOGS = {"steps": 10, "lora_rank": 16, "imitate": "rest"}
"""with --from-logs, where nothing else is said: what tens of runs of one's own bear (docs/training.md)"""
_FROM_LOGS_RATE = 2e-4
_FROM_LOGS_SFT = 1.0
"""lambda_sft beside fresh rollouts: imitation of the logged successes and of mended mutants"""


@settings_options(TrainConfig, FLAGS, names=NAMES)
def command(
    settings: Settings[TrainConfig],
    name: NameOption,
    model: ModelOption = None,
    tasks: Annotated[Path | None, Option(help="Tasks to roll out afresh.")] = None,
    env: EnvOption = None,
    held_out: Annotated[
        Path | None, Option(help="Tasks to measure on, some ten times on the way, and never to learn from.")
    ] = None,
    from_logs: Annotated[bool, Option("--from-logs", help="Train on the runs in the log.")] = False,
    fresh: Annotated[
        int | None,
        Option(
            min=0,
            help="With --from-logs: runs of a group, which fresh rollouts fill up; 0 is logs alone."
            f" (default: {FRESH})",
        ),
    ] = None,
    curriculum: Annotated[
        bool,
        Option(
            "--curriculum",
            help="With --tasks: draw levels and views by their success, which is held between 20 and 80 %.",
        ),
    ] = False,
    device: DeviceOption = None,
    reward: RewardOption = None,
    log: Annotated[list[str] | None, Option()] = None,
    log_to: Annotated[
        str,
        Option(metavar="NAME,...", help="Metrics beside metrics.jsonl: tensorboard, wandb, trackio."),
    ] = "",
    limit: Limit = None,
    net: Net = None,
    tools: ToolOption = None,
    agent: Annotated[
        str | None,
        Option(metavar="CMD", help="An agent of others that makes the rollouts."),
    ] = None,
    agent_folders: Annotated[
        str,
        Option(metavar="DIR,...", help="Folders that the jail of --agent sees."),
    ] = "",
    as_json: JsonOption = False,
) -> int:
    """Train and write checkpoint NAME: --tasks FILE and --env ENV roll out, --from-logs learns from the log.

    With --resume, what is not given is what the training was started with. With --from-logs several --log may
    be given: all are read, and fresh runs are written to the first.
    """
    asked = Asked(
        name=name, model=model, tasks=tasks, held_out=held_out, from_logs=from_logs, fresh=fresh,
        curriculum=curriculum, envs=tuple(env or ()), logs=tuple(log or ()) or log_of_environment(),
        tools=tuple(tools or ()), device=device,
        agent=agent, agent_folders=tuple(name.strip() for name in agent_folders.split(",") if name.strip()),
    )  # fmt: skip
    given, limits = settings.sources, parse_limits(limit) | ({"net": net} if net else {})
    if name and settings.values.get("resume"):
        asked, settings, limits = _resumed(asked, settings, limits)
    config = _config(settings, reward, asked.group_size if asked.from_logs else None, asked)
    asked.check(settings.flags, config.logs.mutants)
    from nano_rl.commands.session import look_first, model_to_train

    model_to_train(asked.model)  # before torch is imported, which takes seconds
    for sentence in config.idle(given, from_logs=asked.from_logs):
        print(sentence, file=sys.stderr)
    look_first(files=(asked.tasks, asked.held_out))
    if config.off_policy_bound and asked.from_logs:
        from nano_rl.gather.rollout_queue import NOT_FROM_LOGS

        raise UsageError(NOT_FROM_LOGS)
    if config.engine and asked.agent:
        raise UsageError("--agent is served by this process: leave --engine or --agent out")
    sinks = [name.strip() for name in log_to.split(",") if name.strip()]
    _train(asked, config, limit=limits, log_to=sinks, quiet=as_json)
    return 0


def _resumed(
    asked: Asked, settings: Settings[TrainConfig], limit: dict[str, Any]
) -> tuple[Asked, Settings[TrainConfig], dict[str, Any]]:
    """The same, over what the training was last started with."""
    from nano_rl.commands.session import trainings_dir
    from nano_rl.record import read_record

    record = read_record(trainings_dir() / asked.name)
    if record is None:
        if not (asked.tasks or asked.envs or asked.from_logs):
            raise UsageError(f"there is no training {asked.name} to resume; leave --resume out to start one")
        return asked, settings, limit
    filled = replace(
        asked, model=asked.model or record.model, logs=asked.logs or record.reachable_logs,
        tools=asked.tools or record.tools, envs=asked.envs or record.envs, agent=asked.agent or record.agent,
        agent_folders=asked.agent_folders or record.agent_folders,
    )  # fmt: skip
    if asked.held_out is None and record.held_out:
        filled = replace(filled, held_out=Path(record.held_out))
    if not (asked.tasks or asked.envs or asked.from_logs):
        tasks = Path(record.tasks) if record.tasks else None
        filled = replace(filled, tasks=tasks, from_logs=record.from_logs)
        if record.from_logs and asked.fresh is None:
            filled = replace(filled, fresh=record.fresh)
        filled = replace(filled, curriculum=record.curriculum)
    return filled, settings.over(saved_settings(record.config)), {**record.limit, **limit}


def _config(
    settings: Settings[TrainConfig], reward: str | None, fresh: int | None, asked: Asked
) -> TrainConfig:
    """The settings; with --from-logs the group size is what is added to each logged group."""
    from nano_rl.commands.session import adapter_rank

    more: dict[str, Any] = {}
    if reward:
        from nano_rl.rewards import parse_reward

        more["reward"] = parse_reward(reward).model_dump()
    if fresh is not None:
        usual = _FROM_LOGS | ({"lambda_sft": _FROM_LOGS_SFT} if fresh else {})
        more |= {name: value for name, value in usual.items() if name not in settings.values}
        if "dtype" not in settings.values:
            from nano_coder.config import load_config
            from nano_coder.models.opening import dtype_to_train
            from nano_rl.commands.session import model_to_train

            device = load_config({"device": asked.device}, Path())[0].device
            more["dtype"] = dtype_to_train(model_to_train(asked.model), device)
        if "learning_rate" not in settings.values.get("optimizer", {}):
            more["optimizer"] = {"learning_rate": _FROM_LOGS_RATE}
        # what is wrong with the size of groups is wrong with --fresh
        blamed = {"group_size": "--fresh"} if fresh else {}
        more |= {"group_size": fresh, **adapter_rank(settings, asked.model)}
        return replace(settings, sources={**settings.sources, **blamed}).config(more)
    config = settings.config(more | adapter_rank(settings, asked.model))
    if config.group_size == 0:
        raise UsageError("--group-size 0 leaves nothing to train on; use --from-logs, or 2 or more")
    return config


def _train(
    asked: Asked, config: TrainConfig, *, limit: dict[str, Any], log_to: list[str], quiet: bool
) -> None:
    """Open what is needed, cheapest refusals first; train, watched; write the checkpoint."""
    from nano_rl.commands.plan import refuse_unfit
    from nano_rl.commands.session import training_folder, training_runtime
    from nano_rl.rewards import open_reward
    from nano_rl.tasks.make import read_tasks

    composed = open_reward(config.reward) if config.reward else None
    unseen = tuple(read_tasks(asked.held_out)) if asked.held_out else ()
    stores = further_logs(asked)
    target, folder = training_folder(asked.name, config.steps if config.resume else None)
    environments, tasks = fresh_tasks(asked, config.seed, folder)
    if composed and tasks:
        composed.probe(tasks)
    from nano_rl.learn.loss import probe_objective  # torch

    probe_objective(config.objective.terms)
    sinks: list[Sink] = []
    if log_to:
        from nano_rl.sinks import open_sinks

        sinks = open_sinks(log_to, name=asked.name, folder=folder, settings=config.model_dump(mode="json"))
    ranks = _ranks()
    size, beside = (ranks.size, ranks.beside) if ranks else (1, 0)
    refuse_unfit(asked.model, config, asked.device, ranks=size, beside=beside)
    opened, parent, runtime = training_runtime(
        asked.model, asked.logs[0] if asked.logs else None, dtype=config.dtype,
        temperature=config.temperature, limit=limit, tools=asked.tools, device=asked.device,
        quantise=config.quantise, agent=asked.agent, agent_folders=asked.agent_folders,
    )  # fmt: skip
    runtime = replace(runtime, environments=environments)

    from nano_coder.models.weights import quiet_transformers
    from nano_rl.checkpoints.checkpoint import save_checkpoint
    from nano_rl.gather.success import refuse_trained
    from nano_rl.learn.metrics import METRICS, read_metrics
    from nano_rl.learn.model.learner import prepare
    from nano_rl.resume.progress import accepted_step
    from nano_rl.resume.states import STATES, States
    from nano_rl.train import identify, train
    from nano_rl.watch import Watch, Watcher, open_view

    sources = open_sources(asked, tasks, config, opened, runtime, stores, composed, folder, quiet=quiet)
    sources = replace(sources, reward=composed, held_out=unseen)
    refuse_trained(sources)
    states = States(folder / STATES)
    accepted_step(states, identify(opened, runtime, sources, config), resume=config.resume)
    with states.claimed():  # what is refused has kept no arguments
        pass
    _record(asked, config, limit, folder, parent, opened, runtime, stores)
    trained = prepare(
        opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )  # fmt: skip
    earlier = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
    view = TrainingView() if quiet else open_view(asked.name, config.steps, earlier)
    with Watcher(folder, view, sinks, done=len(earlier)) as watch:
        callbacks = Watch(watch.on_step, watch.on_run, watch.on_groups)
        used = train(trained, opened, runtime, sources, config, folder, callbacks)
    done = len(read_metrics(folder / METRICS))
    rewards = {k: v for k, v in watch.last.items() if k.startswith("reward")}
    with quiet_transformers():
        save_checkpoint(
            target, trained, opened, parent=parent, config=config, steps=done, run_ids=used,
            tasks=sources.every_task, metrics=rewards,
        )  # fmt: skip
    _tell(target, folder, watch, config.steps, quiet=quiet)


def _ranks() -> Any:
    """The ranks that torchrun started, of which this process is the first; None without torchrun."""
    from nano_rl.gather.engines.workers import started_ranks

    started = started_ranks()
    return started.leader() if started else None


def _record(
    asked: Asked, config: TrainConfig, limit: dict[str, Any], folder: Path, model: str,
    opened: OpenedWeights, runtime: Runtime, further: Sequence[LogStore],
) -> None:  # fmt: skip
    """Keep what was asked, and the tokenizer, for --resume and `nano-rl report`."""
    import time

    from nano_coder import __version__ as runtime_version
    from nano_rl.record import TOKENIZER, TrainingRecord

    TrainingRecord(
        name=asked.name,
        model=model,
        tasks=os.path.realpath(asked.tasks) if asked.tasks else None,
        held_out=os.path.realpath(asked.held_out) if asked.held_out else None,
        from_logs=asked.from_logs,
        fresh=asked.group_size if asked.from_logs else 0,
        curriculum=asked.curriculum,
        log=runtime.store.url,
        more_logs=tuple(store.url for store in further),
        limit=limit,
        tools=asked.tools,
        envs=runtime.environments.references,
        agent=agent.command if (agent := runtime.settings.agent) else None,
        agent_folders=tuple(map(str, agent.mounts)) if agent else (),
        config=config.model_dump(mode="json"),
        nano=runtime_version,
        started=time.time(),
    ).write(folder)
    backend = getattr(opened.loaded.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.save(str(folder / TOKENIZER))


def _success(row: Mapping[str, float]) -> str:
    """A measurement on held-out tasks, as a phrase."""
    interval = f"{row['low']:.1%} to {row['high']:.1%}"
    return f"{row['success']:.1%} ({interval}) of {row['graded']:.0f} tasks after step {row['step']:.0f}"


def _tell(target: Path, folder: Path, watch: Watcher, steps: int, *, quiet: bool) -> None:
    import json
    import math

    from nano_rl.commands.progress import print_metrics
    from nano_rl.gather.success import HELD_OUT_FILE
    from nano_rl.learn.metrics import METRICS, read_metrics, read_rows
    from nano_rl.logs.used_runs import learned_from, learned_table
    from nano_shared.command_line import Console

    rows = read_metrics(folder / METRICS)
    held_out = read_rows(folder / HELD_OUT_FILE) if (folder / HELD_OUT_FILE).exists() else []
    if quiet:
        last = {name: value if math.isfinite(value) else None for name, value in watch.last.items()}
        result = {"checkpoint": str(target), "steps": len(rows), "metrics": last}
        result |= {"held_out": held_out} if held_out else {}
        learned = learned_from(rows)
        print(json.dumps({**result, "learned_from": learned} if learned else result))
        return
    print_metrics(rows)
    if held_out:
        print(f"held out: {_success(held_out[0])}, then {_success(held_out[-1])}", file=sys.stderr)
    table = learned_table(rows)
    if table is not None:
        Console(stderr=True).print(table)
    if len(rows) < steps and rows[-1].get("tasks"):
        solved = rows[-1]["tasks_solved"]
        print(
            f"ended after step {len(rows)} of {steps}: of {rows[-1]['tasks']:.0f} logged tasks {solved:.0f}"
            " are solved in every rollout, and none of the others tells its rollouts apart any more",
            file=sys.stderr,
        )
    elif len(rows) < steps:
        print(
            f"the logs were used up after step {len(rows)} of {steps}; --fresh 8 goes on with fresh rollouts,"
            " --set logs.uses=N learns from each run N times",
            file=sys.stderr,
        )
    print(target)
