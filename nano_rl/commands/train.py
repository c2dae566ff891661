"""`nano-rl train`: policy gradients on fresh rollouts, on the log, or on both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from nano_coder.commands.options import Limit, Net, ToolOption, log_of_environment
from nano_coder.config import parse_limits
from nano_coder.installed_views import TrainingView
from nano_rl.commands.options import DeviceOption, EnvOption, ModelOption, NameOption, RewardOption
from nano_rl.config import TrainConfig, vllm_python
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import UsageError
from nano_shared.settings import Settings, settings_options

if TYPE_CHECKING:
    from nano_coder.environment import Environments
    from nano_coder.models.opening import OpenedWeights
    from nano_coder.run.execution import Runtime
    from nano_rl.gather.step_groups import Sources
    from nano_rl.logs.logged_groups import LogContents
    from nano_rl.rewards import Reward
    from nano_rl.training_record import TrainArguments
    from nano_shared.store import LogStore
    from nano_shared.types import Task

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
"""lambda_sft beside fresh rollouts: imitation of the logged successes and of fixed mutants"""
Say = Callable[[str], None]


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
        str | None,
        Option(
            metavar="[NAME]",
            help="With --tasks: draw levels and views by their success, which is held between 20 and 80 %;"
            " or what NAME, FILE.py:NAME chooses.",
        ),
    ] = None,
    device: DeviceOption = None,
    reward: RewardOption = None,
    log: Annotated[list[str] | None, Option()] = None,
    log_to: Annotated[
        str,
        Option(
            metavar="NAME,...",
            help="Metrics beside metrics.jsonl: tensorboard, wandb, trackio, FILE.py:NAME.",
        ),
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
    from nano_rl.training_record import TrainArguments

    arguments = TrainArguments(
        name=name or "", model=model, tasks=tasks, held_out=held_out, from_logs=from_logs,
        fresh=FRESH if fresh is None and from_logs else fresh, curriculum=curriculum, envs=env or (),
        logs=log or log_of_environment(), tools=tools or (), device=device, agent=agent,
        agent_folders=_names(agent_folders), limit=parse_limits(limit) | ({"net": net} if net else {}),
    )  # fmt: skip
    given = settings.sources
    if name and settings.values.get("resume"):
        arguments, settings = _resumed(arguments, settings, says_fresh=fresh is not None)
    config = _config(settings, reward, arguments)
    refuse_contradictions(arguments, settings.flags, config)
    from nano_rl.command_setup import look_first, model_to_train

    model_to_train(arguments.model)  # before torch is imported, which takes seconds
    for sentence in config.idle(given, from_logs=arguments.from_logs):
        print(sentence, file=sys.stderr)
    look_first(files=(arguments.tasks, arguments.held_out))
    _train(arguments, config, log_to=_names(log_to), quiet=as_json)
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _resumed(
    given: TrainArguments, settings: Settings[TrainConfig], *, says_fresh: bool
) -> tuple[TrainArguments, Settings[TrainConfig]]:
    from nano_rl.command_setup import trainings_dir
    from nano_rl.training_record import TrainArguments, read_record

    record = read_record(trainings_dir() / given.name)
    names_source = bool(given.tasks or given.envs or given.from_logs)
    if record is None:
        raise UsageError(f"there is no training {given.name} to resume; leave --resume out to start one")
    before = {name: getattr(record, name) for name in TrainArguments.model_fields}
    if names_source:
        before = {n: v for n, v in before.items() if n not in ("tasks", "from_logs", "fresh", "curriculum")}
    said = {n: v for n, v in given if v and (n != "fresh" or says_fresh or names_source)}
    limit = {**record.limit, **given.limit}
    both = {**dict(given), **before, "logs": record.reachable_logs, "device": None, **said, "limit": limit}
    return TrainArguments(**both), settings.over(record.config)


def _config(settings: Settings[TrainConfig], reward: str | None, arguments: TrainArguments) -> TrainConfig:
    """The settings; with --from-logs the group size is what is added to each logged group."""
    from nano_rl.command_setup import adapter_rank, model_to_train

    more: dict[str, Any] = {}
    if reward:
        from nano_rl.rewards import COMPOSERS

        more["reward"] = COMPOSERS.find("composed").parse_reward(reward).model_dump()
    if not arguments.from_logs:
        config = settings.config(more | adapter_rank(settings, arguments.model))
        if config.group_size == 0:
            raise UsageError("--group-size 0 leaves nothing to train on; use --from-logs, or 2 or more")
        return config
    fresh = arguments.fresh or 0
    usual = _FROM_LOGS | ({"lambda_sft": _FROM_LOGS_SFT} if fresh else {})
    more |= {name: value for name, value in usual.items() if name not in settings.values}
    if "dtype" not in settings.values:
        from nano_coder.config import load_config
        from nano_coder.models.opening import dtype_to_train

        device = load_config({"device": arguments.device}, Path())[0].device
        more["dtype"] = dtype_to_train(model_to_train(arguments.model), device)
    if "learning_rate" not in settings.values.get("optimizer", {}):
        more["optimizer"] = {"learning_rate": _FROM_LOGS_RATE}
    # what is wrong with the size of groups is wrong with --fresh
    blamed = {"group_size": "--fresh"} if fresh else {}
    more |= {"group_size": fresh, **adapter_rank(settings, arguments.model)}
    return replace(settings, sources={**settings.sources, **blamed}).config(more)


def refuse_contradictions(given: TrainArguments, flags: Collection[str], config: TrainConfig) -> None:
    """Raises UsageError where the arguments, or the settings `flags`, contradict each other."""
    of_logs = sorted(name for name in flags if name.startswith("logs."))
    wants_mutants = "logs.mutants" in flags and config.logs.mutants > 0
    if not (given.tasks or given.envs or given.from_logs) or (given.from_logs and given.tasks):
        raise UsageError(
            "give either --tasks FILE or --env ENV, or --from-logs (with --fresh 0 for no rollouts beside"
            " the log)"
        )
    if given.from_logs and given.curriculum:
        raise UsageError(
            "--curriculum chooses among tasks to roll out; give --tasks FILE instead of --from-logs"
        )
    if given.from_logs and "group_size" in flags:
        raise UsageError("--group-size is --fresh with --from-logs: give that alone")
    if given.from_logs and wants_mutants and not given.fresh:
        raise UsageError("logs.mutants acts beside fresh rollouts: leave --fresh 0 or it out")
    if not given.from_logs and given.fresh is not None:
        raise UsageError("--fresh adds rollouts to logged groups: give --from-logs, or --group-size alone")
    if not given.from_logs and len(given.logs) > 1:
        raise UsageError("several --log are read together with --from-logs; without it give one")
    if not given.from_logs and of_logs and (wants_mutants or of_logs != ["logs.mutants"]):
        raise UsageError(f"{of_logs[0]} is read with --from-logs alone: give that too, or leave it out")
    if config.off_policy_bound and given.from_logs:
        raise UsageError(
            "--async rolls out tasks ahead, and groups that begin in a log are not drawn ahead: give"
            " --tasks FILE instead of --from-logs, or leave the other out"
        )
    if config.engine and given.agent:
        raise UsageError("--agent is served by this process: leave --engine or --agent out")
    if config.engine and not config.engine[0].startswith("http"):
        vllm_python(config.engine[0])


def _train(given: TrainArguments, config: TrainConfig, *, log_to: list[str], quiet: bool) -> None:
    from nano_rl.command_setup import training_folder, training_runtime
    from nano_rl.rewards import COMPOSERS
    from nano_rl.tasks.task_file import read_tasks

    composed = COMPOSERS.find("composed").open_reward(config.reward) if config.reward else None
    held_out = tuple(read_tasks(given.held_out)) if given.held_out else ()
    further = further_logs(given)
    target, folder = training_folder(given.name, config.steps if config.resume else None)
    environments, tasks = fresh_tasks(given, config.seed, folder)
    if composed and tasks:
        composed.probe(tasks)
    from nano_rl.command_setup import PLANS
    from nano_rl.gather.step_groups import Sources, open_curriculum, refuse_trained
    from nano_rl.learn.advantages import probe_advantage
    from nano_rl.learn.learner import started_ranks
    from nano_rl.learn.loss import probe_objective  # torch
    from nano_rl.training_record import open_sinks

    refuse_trained(Sources(tasks=tasks, held_out=held_out))
    probe_objective(config.objective.terms)
    probe_advantage(config.objective.terms)
    curriculum = open_curriculum(given.curriculum, tasks, config) if given.curriculum else None
    sinks = open_sinks(log_to, name=given.name, folder=folder, settings=config.model_dump(mode="json"))
    ranks = started.leader() if (started := started_ranks()) else None
    size, beside = (ranks.size, ranks.beside) if ranks else (1, 0)
    if "memory" in PLANS:
        PLANS["memory"].refuse_unfit(given.model, config, given.device, ranks=size, beside=beside)
    opened, runtime = training_runtime(given, config)
    runtime = replace(runtime, environments=environments)

    from nano_coder.models.weights import quiet_transformers
    from nano_rl.checkpoints.checkpoint import Learned, save_checkpoint
    from nano_rl.learn.learner import prepare
    from nano_rl.learn.metrics import METRICS, read_metrics
    from nano_rl.resume import STATES, States, accepted_step
    from nano_rl.train import identify, train
    from nano_rl.training_record import Watch, Watcher, open_view, write_record

    say: Say = (lambda _: None) if quiet else partial(print, file=sys.stderr)
    sources = open_sources(given, tasks, config, opened, runtime, further, composed, folder, say)
    sources = replace(sources, reward=composed, held_out=held_out, curriculum=curriculum)
    refuse_trained(sources)
    states = States(folder / STATES)
    accepted_step(states, identify(opened, runtime, sources, config), resume=config.resume)
    with states.claimed():  # what is refused has kept no arguments
        pass
    write_record(folder, given, config, runtime, further, opened.loaded.tokenizer)
    trained = prepare(
        opened.loaded.model, lora_rank=config.lora_rank, seed=config.seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )  # fmt: skip
    earlier = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
    view = TrainingView() if quiet else open_view(given.name, config.steps, earlier)
    with Watcher(folder, view, sinks, done=len(earlier)) as watch:
        callbacks = Watch(watch.on_step, watch.on_run, watch.on_groups)
        used = train(trained, opened, runtime, sources, config, folder, callbacks)
    rows = read_metrics(folder / METRICS)
    rewards = {k: v for k, v in watch.last.items() if k.startswith("reward")}
    learned = Learned(steps=len(rows), run_ids=used, tasks=sources.every_task, metrics=rewards)
    with quiet_transformers():
        save_checkpoint(target, trained, opened, parent=runtime.policy_name, config=config, learned=learned)
    _report(target, folder, rows, watch.last, config.steps, quiet=quiet)


def fresh_tasks(given: TrainArguments, seed: int, folder: Path) -> tuple[Environments, tuple[Task, ...]]:
    """The environments, and the tasks to roll out: those of --tasks, then those of the environments, which
    `folder` keeps, so that a training that goes on has the same."""
    from nano_coder.environment import Environments
    from nano_rl.resume import STATES
    from nano_rl.tasks.task_file import read_tasks, unproven, write_tasks
    from nano_shared.types import Split

    environments = Environments.open(given.envs) if given.envs else Environments()
    own = read_tasks(given.tasks) if given.tasks else []
    if unchecked := unproven(own):
        raise UsageError(
            f"{len(unchecked)} of the {len(own)} tasks of {given.tasks} have tests that no oracle has passed"
            f" ({unchecked[0].key} first), so right work may earn nothing; nano-rl tasks check {given.tasks}"
            " --out CHECKED.jsonl runs the oracles and keeps the tasks that may be trained on"
        )
    if given.from_logs or not given.envs:
        return environments, tuple(own)
    file = folder / ENVIRONMENT_TASKS
    if (folder / STATES).exists() and file.exists():
        return environments, (*own, *read_tasks(file))
    theirs = list(environments.tasks(Split.TRAIN, seed))
    write_tasks(file, theirs)
    return environments, (*own, *theirs)


def further_logs(given: TrainArguments) -> list[LogStore]:
    """The logs that are read and not written. Raises UsageError for one that is not there, or given twice."""
    from nano_shared.store import LogStore

    if not given.from_logs:
        return []
    for number, name in enumerate(given.logs):
        if name in given.logs[:number]:
            raise UsageError(f"--log {name} is given twice")
        # only a log that fresh runs are written to may come into being
        may_be_new = not number and given.fresh and len(given.logs) > 1
        if "://" not in name and not Path(name).exists() and not may_be_new:
            raise UsageError(f"--log {name}: there is no such log; nano-coder log path shows the default one")
    return [LogStore.open(name, create=False) for name in given.logs[1:]]


def open_sources(
    given: TrainArguments, tasks: tuple[Task, ...], config: TrainConfig, opened: OpenedWeights,
    runtime: Runtime, further: Sequence[LogStore], composed: Reward | None, folder: Path, say: Say,
) -> Sources:  # fmt: skip
    from nano_coder.models.opening import local_policy
    from nano_rl.gather.step_groups import Sources, pair_term
    from nano_rl.imitation import solved_oracles, succeeded
    from nano_rl.logs.logged_groups import LoggedGroup, LoggedRuns, lineage, read_logs

    if not given.from_logs:
        return Sources(tasks=tasks)
    way, stores = lineage(opened), [runtime.store, *further]
    template = local_policy(opened.loaded, opened.profile).template_hash
    rescore = partial(composed.apply, runtime=runtime) if composed else None
    contents = read_logs(stores, opened, template, way, config, rescore=rescore)
    say(contents.report())
    mutants = _mutants(given, contents, config, stores, runtime, folder, say)
    rest = contents.rest
    if config.lambda_sft and config.imitate == "rest":
        known = {run.id for run in rest}
        shown = solved_oracles([task for task in mutants if task.oracle], runtime)
        rest = (*rest, *(run for run in shown if run.id not in known))
        if shown:
            weight = f"lambda_sft {config.lambda_sft:g}"
            say(f"imitated beside ({weight}): {len(shown)} of {len(mutants)} mutants, fixed")
    logs = LoggedRuns(stores=stores)
    if sentence := _cost(contents, len(mutants), config):
        say(sentence)
    paired, rest_ids = pair_term(config), {run.id for run in contents.rest}
    pairs = paired.pairs_beside(stores, rest_ids, contents.usable, config) if paired else ()
    beside = (config.lambda_sft > 0 and any(map(succeeded, contents.rest))) or pairs
    if not (contents.groups or beside):
        contents.refuse_nothing(stores, fresh=config.group_size > 0)
    return Sources(
        # mutants last: resuming takes these, and not the groups that their rollouts have formed by then
        logged=(*contents.groups, *(LoggedGroup(task_key=m.key, runs=logs, mutant=m) for m in mutants)),
        policy_versions=contents.policy_versions, learned_from=way.learned_from, rest=rest, pairs=pairs,
        pair_of=paired.pair_of if paired else None,
    )  # fmt: skip


def _mutants(
    given: TrainArguments, contents: LogContents, config: TrainConfig, stores: Sequence[LogStore],
    runtime: Runtime, folder: Path, say: Say,
) -> list[Task]:  # fmt: skip
    """Tasks of mutants of what logged runs left: made before the first step, then kept in the folder."""
    from nano_rl.resume import STATES
    from nano_rl.tasks.from_log import SECONDS, MutantSearch, check_command, mutant_tasks
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
    held_out = read_tasks(given.held_out) if given.held_out else []
    texts = {text for task in held_out for text in task.files.values()}
    search = MutantSearch(count=config.logs.mutants, seed=config.seed, held_out=texts)
    tasks, report = mutant_tasks(runs, search, blobs, runtime.sandbox)
    say(report)
    known = {group.task_key for group in contents.groups}  # by an earlier training
    tasks = [task for task in tasks if task.key not in known]
    if tasks:
        write_tasks(file, tasks)
    return tasks


def _cost(contents: LogContents, mutants: int, config: TrainConfig) -> str | None:
    tasks = sum(not group.forked for group in contents.groups)
    if not (config.group_size and tasks):
        return None
    at_once = min(config.prompts_per_step, tasks + mutants)
    more = f" and {mutants} mutants" if mutants else ""
    return (
        f"environments: {tasks} logged tasks{more}; at most {config.steps * at_once * config.group_size}"
        f" fresh rollouts ({config.steps} steps of {at_once} tasks, {config.group_size} runs each, less what"
        " the log has of them); each step says how much time is left, and the same command goes on after"
        " Ctrl-C"
    )


def _report(
    target: Path, folder: Path, rows: list[dict[str, Any]], last: dict[str, float], steps: int, *, quiet: bool
) -> None:
    import math

    from nano_rl.gather.rollouts import HELD_OUT_FILE
    from nano_rl.learn.metrics import read_rows
    from nano_rl.training_record import learned_from, print_metrics

    held_out = read_rows(folder / HELD_OUT_FILE) if (folder / HELD_OUT_FILE).exists() else []
    finite = {name: value if math.isfinite(value) else None for name, value in last.items()}
    result: dict[str, Any] = {"checkpoint": str(target), "steps": len(rows), "metrics": finite}
    result |= {"held_out": held_out} if held_out else {}
    result |= {"learned_from": learned} if (learned := learned_from(rows)) else {}

    def show() -> None:
        print_metrics(rows)
        if held_out:
            first, now = (
                f"{row['success']:.1%} ({row['low']:.1%} to {row['high']:.1%}) of {row['graded']:.0f} tasks"
                f" after step {row['step']:.0f}"
                for row in (held_out[0], held_out[-1])
            )
            print(f"held out: {first}, then {now}", file=sys.stderr)
        if len(rows) < steps:
            print(_why_ended(rows, steps), file=sys.stderr)
        print(target)

    emit(result, quiet, show)


def _why_ended(rows: list[dict[str, Any]], steps: int) -> str:
    done = f"after step {len(rows)} of {steps}"
    if tasks := rows[-1].get("tasks"):
        return (
            f"ended {done}: of {tasks:.0f} logged tasks {rows[-1]['tasks_solved']:.0f} are solved in every"
            " rollout, and none of the others tells its rollouts apart any more"
        )
    return (
        f"the logs were used up {done}; --fresh 8 goes on with fresh rollouts, --set logs.uses=N learns from"
        " each run N times"
    )
