"""`nano-rl train`: policy gradients on fresh rollouts, on the log, or on both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
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
from nano_rl.config import TrainConfig, saved_settings
from nano_shared.command_line import JsonOption
from nano_shared.errors import UsageError
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    from nano_coder.environment import Environments
    from nano_coder.models.opening import OpenedWeights
    from nano_coder.run.execution import Runtime
    from nano_coder.sandbox.protocol import Sandbox
    from nano_rl.gather.sources import Sources
    from nano_rl.logs.reader import LogContents
    from nano_rl.rewards import Reward
    from nano_rl.sinks import Sink
    from nano_rl.watch import Watcher
    from nano_shared.store import LogStore
    from nano_shared.types import Task, Trajectory


MUTANTS = "mutants.jsonl"
ENVIRONMENT_TASKS = "environment_tasks.jsonl"
"""names of files in the folder of a training"""
FRESH = 8
"""runs of a logged group, which fresh rollouts fill up where nothing is said"""


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
    from nano_rl.tasks.task_file import read_tasks

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
    from nano_rl.gather.sources import refuse_trained
    from nano_rl.learn.learner import prepare
    from nano_rl.learn.metrics import METRICS, read_metrics
    from nano_rl.resume import STATES, States, accepted_step
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
    from nano_rl.learn.learner import started_ranks

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
    from nano_rl.gather.rollouts import HELD_OUT_FILE
    from nano_rl.learn.metrics import METRICS, read_metrics, read_rows
    from nano_rl.record import learned_from

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is trained on what: the arguments beside the config."""

    name: str
    model: str | None
    tasks: Path | None
    held_out: Path | None
    from_logs: bool
    fresh: int | None
    """None: FRESH with --from-logs"""
    curriculum: bool
    logs: tuple[str, ...]
    """the first is written to; none: the default one"""
    envs: tuple[str, ...] = ()
    """environments, as --env takes them"""
    tools: tuple[str, ...] = ()
    """further tools of the agents, as --tool takes them"""
    device: str | None = None
    """None: as configured"""
    agent: str | None = None
    """command of an agent of others"""
    agent_folders: tuple[str, ...] = ()

    @property
    def group_size(self) -> int:
        """With --from-logs: what fresh rollouts fill a group up to; 0 where they do not."""
        return FRESH if self.fresh is None else self.fresh

    def check(self, flags: Collection[str] = (), mutants: int = 1) -> None:
        """Raises UsageError where the arguments, or these settings given as flags, contradict each other.
        `mutants` is `logs.mutants`, of which 0 asks for none."""
        flags = [name for name in flags if mutants or name != "logs.mutants"]
        if self.from_logs == (self.tasks is not None) and (self.from_logs or not self.envs):
            raise UsageError(
                "give either --tasks FILE or --env ENV, or --from-logs (with --fresh 0 for no rollouts beside"
                " the log)"
            )
        if self.curriculum and self.from_logs:
            raise UsageError(
                "--curriculum chooses among tasks to roll out; give --tasks FILE instead of --from-logs"
            )
        if self.from_logs and "group_size" in flags:
            raise UsageError("--group-size is --fresh with --from-logs: give that alone")
        if self.from_logs:
            if "logs.mutants" in flags and not self.group_size:
                raise UsageError("logs.mutants acts beside fresh rollouts: leave --fresh 0 or it out")
            return
        if self.fresh is not None:
            raise UsageError(
                "--fresh adds rollouts to logged groups: give --from-logs, or --group-size alone"
            )
        if len(self.logs) > 1:
            raise UsageError("several --log are read together with --from-logs; without it give one")
        only = sorted(name for name in flags if name.startswith("logs."))
        if only:
            raise UsageError(f"{only[0]} is read with --from-logs alone: give that too, or leave it out")


def fresh_tasks(asked: Asked, seed: int, folder: Path) -> tuple[Environments, tuple[Task, ...]]:
    """The environments, and the tasks to roll out: those of --tasks, then those of the environments, which
    `folder` keeps, so that a training that goes on has the same."""
    from nano_coder.environment import Environments
    from nano_rl.resume import STATES
    from nano_rl.tasks.check import unproven
    from nano_rl.tasks.task_file import read_tasks, write_tasks
    from nano_shared.types import Split

    environments = Environments.open(asked.envs)
    own = read_tasks(asked.tasks) if asked.tasks else []
    if unchecked := unproven(own):
        raise UsageError(
            f"{len(unchecked)} of the {len(own)} tasks of {asked.tasks} have tests that no oracle has passed"
            f" ({unchecked[0].key} first), so right work may earn nothing; nano-rl tasks check {asked.tasks}"
            " --out CHECKED.jsonl runs the oracles and keeps the tasks that may be trained on"
        )
    if asked.from_logs or not asked.envs:
        return environments, tuple(own)
    file = folder / ENVIRONMENT_TASKS
    if (folder / STATES).exists() and file.exists():
        return environments, (*own, *read_tasks(file))
    theirs = list(environments.tasks(Split.TRAIN, seed))
    write_tasks(file, theirs)
    return environments, (*own, *theirs)


def open_sources(
    asked: Asked,
    tasks: tuple[Task, ...],
    config: TrainConfig,
    opened: OpenedWeights,
    runtime: Runtime,
    further: Sequence[LogStore],
    composed: Reward | None,
    folder: Path,
    *,
    quiet: bool,
) -> Sources:
    """Where groups come from. Raises UsageError where the logs can teach nothing."""
    from nano_coder.models.opening import local_policy
    from nano_rl.gather.curriculum import Curriculum
    from nano_rl.gather.sources import Sources, pair_term
    from nano_rl.imitation import succeeded
    from nano_rl.logs.reader import LoggedGroup, LoggedRuns, lineage, read_logs

    if not asked.from_logs:
        return Sources(tasks=tasks, curriculum=Curriculum(tasks, config.seed) if asked.curriculum else None)
    way = lineage(opened)
    stores = [runtime.store, *further]
    contents = read_logs(
        stores,
        opened,
        local_policy(opened.loaded, opened.profile).template_hash,
        way,
        config,
        rescore=(lambda runs: composed.apply(runs, runtime)) if composed else None,
    )
    say: Callable[[str], None] = (lambda _: None) if quiet else partial(print, file=sys.stderr)
    say(contents.report())
    mutants = _mutants(asked, contents, config, stores, runtime.sandbox, folder, say)
    rest = _with_demonstrations(contents.rest, mutants, config, runtime, say)
    logs = LoggedRuns(stores=stores)
    for line in _cost(contents, len(mutants), config, runtime.store):
        say(line)
    paired, rest_ids = pair_term(config), {run.id for run in contents.rest}
    pairs = paired.pairs_beside(stores, rest_ids, contents.usable, config) if paired else ()
    beside = (config.lambda_sft > 0 and any(map(succeeded, contents.rest))) or pairs
    if not (contents.groups or beside):
        contents.refuse_nothing(stores, fresh=config.group_size > 0)
    return Sources(
        # mutants last: resuming takes these, and not the groups that their rollouts have formed by then
        logged=(*contents.groups, *(LoggedGroup(task_key=m.key, runs=logs, mutant=m) for m in mutants)),
        policy_versions=contents.policy_versions,
        learned_from=way.learned_from,
        rest=rest,
        pairs=pairs,
        pair_of=paired.pair_of if paired else None,
    )


def further_logs(asked: Asked) -> list[LogStore]:
    """The logs that are read and not written. Raises UsageError for one that is not there, or given twice."""
    from nano_shared.store import LogStore

    if not asked.from_logs:
        return []
    for number, name in enumerate(asked.logs):
        if name in asked.logs[:number]:
            raise UsageError(f"--log {name} is given twice")
        # only a log that fresh runs are written to may come into being
        if (
            "://" not in name
            and not Path(name).exists()
            and (number or not asked.group_size or len(asked.logs) == 1)
        ):
            raise UsageError(f"--log {name}: there is no such log; nano-coder log path shows the default one")
    return [LogStore.open(name, create=False) for name in asked.logs[1:]]


def _mutants(
    asked: Asked, contents: LogContents, config: TrainConfig, stores: Sequence[LogStore], sandbox: Sandbox,
    folder: Path, say: Callable[[str], None],
) -> list[Task]:  # fmt: skip
    """Tasks of mutants of what logged runs left: made before the first step, then kept in the folder."""
    from nano_rl.resume import STATES
    from nano_rl.tasks.from_log import SECONDS, check_command, mutant_tasks
    from nano_rl.tasks.task_file import read_tasks, write_tasks
    from nano_shared import snapshot

    file = folder / MUTANTS
    if not (config.group_size and config.logs.mutants):
        return []
    if (folder / STATES).exists():
        return read_tasks(file) if file.exists() else []
    wanted = ((log, run) for log, run in contents.passed if check_command(stores[log].task(run)))
    runs, blobs = [], stores[0].blobs  # fresh runs are written to the first log
    for log, run in islice(wanted, 64):  # the newest show the project as it is
        runs.append(stores[log].get(run))
        for tree in filter(None, (runs[-1].snapshot, runs[-1].last_snapshot)):
            snapshot.copy(tree, stores[log].blobs, blobs)
    if not runs:
        return []
    say(
        f"mutants: making up to {config.logs.mutants} more tasks of what {len(runs)} passing runs left, for"
        f" at most {SECONDS:.0f} s; each takes two runs of a check (--set logs.mutants=0 makes none)"
    )
    unseen = read_tasks(asked.held_out) if asked.held_out else []
    texts = {text for task in unseen for text in task.files.values()}
    tasks, report = mutant_tasks(runs, config.logs.mutants, blobs, sandbox, seed=config.seed, held_out=texts)
    say(report)
    known = {group.task_key for group in contents.groups}  # by an earlier training
    tasks = [task for task in tasks if task.key not in known]
    if tasks:
        write_tasks(file, tasks)
    return tasks


def _with_demonstrations(
    rest: tuple[Trajectory, ...], mutants: Sequence[Task], config: TrainConfig, runtime: Runtime,
    say: Callable[[str], None],
) -> tuple[Trajectory, ...]:  # fmt: skip
    """The runs that are imitated, with a successful run of each mutant's oracle where successes are."""
    from nano_rl.imitation import solved_oracles

    if config.lambda_sft == 0 or config.imitate != "rest":
        return rest
    shown = solved_oracles([task for task in mutants if task.oracle], runtime)
    if shown:
        weight = f"lambda_sft {config.lambda_sft:g}"
        say(f"imitated beside ({weight}): {len(shown)} of {len(mutants)} mutants, mended")
    known = {run.id for run in rest}
    return (*rest, *(run for run in shown if run.id not in known))


def _cost(contents: LogContents, mutants: int, config: TrainConfig, store: LogStore) -> Iterator[str]:
    """What the fresh rollouts will take, by how long the runs in the log took."""
    from nano_rl.watch import duration

    tasks = sum(not group.forked for group in contents.groups)
    if not (config.group_size and tasks):
        return
    at_once = min(config.prompts_per_step, tasks + mutants)
    rollouts = config.steps * at_once * config.group_size
    more = f" and {mutants} mutants" if mutants else ""
    yield (
        f"environments: {tasks} logged tasks{more}; at most {rollouts} fresh rollouts ({config.steps} steps"
        f" of {at_once} tasks, {config.group_size} runs each, less what the log has of them)"
    )
    took = [run.ended - run.started for run in store.runs(limit=200) if run.ended is not None]
    if took:
        each = median(took)
        yield (
            f"time: a run took {each:.0f} s in the log, so {duration(rollouts * each)} one after another;"
            " those of a step are decoded together, which is several times faster, and learning from them"
            " comes on top. Each step says how much is left; Ctrl-C ends after a step, and the same command"
            " goes on"
        )
