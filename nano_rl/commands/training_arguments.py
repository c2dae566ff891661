"""What `nano-rl train` is asked to train on: arguments that agree, and the sources they name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from nano_rl.config.training import TrainConfig
from nano_shared.errors import UsageError

if TYPE_CHECKING:
    from nano_coder.environment import Environments
    from nano_coder.models.opening import OpenedWeights
    from nano_coder.run.execution import Runtime
    from nano_coder.sandbox.protocol import Sandbox
    from nano_rl.gather.sources import Sources
    from nano_rl.logs.reader import LogContents
    from nano_rl.rewards import Reward
    from nano_shared.store import LogStore
    from nano_shared.types import Task, Trajectory


MUTANTS = "mutants.jsonl"
ENVIRONMENT_TASKS = "environment_tasks.jsonl"
"""names of files in the folder of a training"""
FRESH = 8
"""runs of a logged group, which fresh rollouts fill up where nothing is said"""


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
    from nano_rl.resume.states import STATES
    from nano_rl.tasks.check import unproven
    from nano_rl.tasks.make import read_tasks, write_tasks
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
    from nano_rl.imitation.rows import succeeded
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
    from nano_rl.resume.states import STATES
    from nano_rl.tasks.make import read_tasks, write_tasks
    from nano_rl.tasks.project_mutants import SECONDS, check_command, mutant_tasks
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
    from nano_rl.imitation.demonstrations import solved_oracles

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
