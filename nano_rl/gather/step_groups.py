"""The groups of each step: from fresh rollouts, from logs, or from logs topped up with fresh rollouts; and
the replay buffer, the logged runs of a training by task.

A logged run is taken at most `uses` times, the newest runs of a task first; runs that are too old, or whose
tokens turn out to be damaged, are dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from nano_coder.run.execution import Runtime
from nano_coder.run.tries import OnRun
from nano_rl.config import TrainConfig
from nano_rl.gather.rollouts import RollOut, collect, failed, none_graded
from nano_rl.learn.advantages import CreditedGroup, RolloutBatch, credit_group
from nano_rl.learn.groups import Group, GroupMember, form_groups
from nano_rl.logs.logged_groups import LoggedGroup, LoggedTasks, members_of
from nano_rl.rewards import Reward
from nano_shared.errors import CheckpointError, GuardTripped, UsageError
from nano_shared.extension_points import Extensions, call_extension, described, takes
from nano_shared.files import content_hash
from nano_shared.snapshot import BlobStore
from nano_shared.types import Task, Trajectory

if TYPE_CHECKING:
    from torch import nn

    from nano_coder.models.opening import OpenedWeights
    from nano_shared.store import LogStore


class RunPair(Protocol):
    chosen_run: str | None
    rejected_run: str | None


class PairTerm(Protocol):
    """Pairs of logged runs, and the loss term on them: an extension of `nano.terms`, a module."""

    def pairs_beside(
        self, stores: Sequence[LogStore], rest: set[str], usable: set[str], config: TrainConfig
    ) -> tuple[RunPair, ...]:
        """Pairs of which one side cannot train a policy gradient; none if `logs.lambda_preference` is 0."""

    def pair_of(self, chosen: Trajectory, rejected: Trajectory, blobs: BlobStore) -> RunPair | None: ...

    def preference_term(
        self, model: nn.Module, opened: OpenedWeights, pairs: Sequence[RunPair], config: TrainConfig
    ) -> Any:
        """A term of the loss, as `Updater.terms` takes them; None without pairs."""


PAIR_TERMS: Extensions[PairTerm] = Extensions("nano.terms")


def pair_term(config: TrainConfig) -> PairTerm | None:
    """What `logs.lambda_preference` needs; None where it is 0. Raises ConfigError if it is not installed."""
    return PAIR_TERMS.find("preferences") if config.logs.lambda_preference else None


class Curriculum(Protocol):
    """Which tasks come next: an extension of `nano.curricula`, made of the tasks and a seed. What it draws is
    a function of these, the step and its state, which is saved and restored. It may have `metrics()`, of
    which `curriculum_level` counts before the reward where the best step is looked for."""

    def draw(self, step: int, count: int, *, taken: Collection[str] = ()) -> Sequence[Task]:
        """`count` different tasks for one step, none with a key in `taken`; fewer if there are no more."""

    def record(self, groups: Sequence[Group]) -> None:
        """The results of a step."""
        ...

    def state(self) -> Any:
        """JSON"""
        ...

    def restore(self, state: Any) -> None: ...


CURRICULA: Extensions[Callable[[Sequence[Task], int], Curriculum]] = Extensions(
    "nano.curricula", check=lambda make: takes(make, "tasks", "seed")
)
_METHODS = ("draw", "record", "state", "restore")


def open_curriculum(name: str, tasks: Sequence[Task], config: TrainConfig) -> Curriculum:
    """The curriculum of that name. Two more are made and tried: one restored from the other's state must draw
    what that one draws. Raises UsageError."""
    make, named = CURRICULA.named("--curriculum", name), f"--curriculum {name}"
    made: list[Curriculum] = [
        call_extension(make, tasks, config.seed, name=named, error=UsageError) for _ in range(3)
    ]
    if lacking := [method for method in _METHODS if not callable(getattr(made[0], method, None))]:
        raise UsageError(f"{named} made what is {described(made[0])}, without {', '.join(lacking)}")
    draw_tasks(made[1], tasks, 0, config.prompts_per_step)
    _ask(made[2], "restore", curriculum_state(made[1]))
    first, second = (draw_tasks(one, tasks, 1, config.prompts_per_step) for one in made[1:])
    if first != second:
        raise UsageError(
            f"{named} draws other tasks once its state was saved and restored, so no training could go on as"
            " it began; what it draws must depend on tasks, seed, step and state() alone"
        )
    return made[0]


def _ask(curriculum: Curriculum, method: str, *values: object, **named: Any) -> Any:
    name = f"the curriculum {type(curriculum).__name__}"
    return call_extension(getattr(curriculum, method), *values, name=name, error=UsageError, **named)


def draw_tasks(
    curriculum: Curriculum, tasks: Sequence[Task], step: int, count: int, *, taken: Collection[str] = ()
) -> list[Task]:
    """What a curriculum draws of `tasks`. Raises UsageError for anything but what it was asked for."""
    given = _ask(curriculum, "draw", step, count, taken=taken)
    own, drawn = set(map(id, tasks)), list(given) if isinstance(given, Sequence) else []
    wrong = None
    if not isinstance(given, Sequence):
        wrong = "nothing" if given is None else f"what is {described(given)}"
    elif not (drawn or taken):
        wrong = "nothing"
    elif not own.issuperset(map(id, drawn)):
        wrong = "what is none of the tasks that it was made of"
    elif len({*taken, *(task.key for task in drawn)}) < len(set(taken)) + len(drawn):
        wrong = "a task that the step has already"
    elif len(drawn) > count:
        wrong = f"{len(drawn)} tasks"
    if wrong:
        raise UsageError(
            f"the curriculum {type(curriculum).__name__} drew {wrong} for step {step}, where {count} of"
            f" {len(tasks)} were asked for"
        )
    return drawn


def curriculum_state(curriculum: Curriculum) -> Any:
    """Its state as it will be restored. Raises UsageError for what JSON cannot hold."""
    try:
        return json.loads(json.dumps(_ask(curriculum, "state")))
    except (TypeError, ValueError) as problem:
        raise UsageError(
            f"the curriculum {type(curriculum).__name__} has a state that is no JSON, and cannot be saved:"
            f" {problem}"
        ) from None


def curriculum_metrics(curriculum: Curriculum | None) -> dict[str, float]:
    return dict(_ask(curriculum, "metrics")) if curriculum and hasattr(curriculum, "metrics") else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Tasks to roll out, logged groups, or both, and what a training knows about the logged runs."""

    tasks: tuple[Task, ...] = ()
    logged: tuple[Group | LoggedGroup, ...] = ()
    policy_versions: Mapping[str, int] = field(default_factory=dict)
    """logged run -> version of the policy that sampled it; without one that of its oldest turn counts"""
    learned_from: frozenset[str] = frozenset()
    """logged runs that the policy or an ancestor of it was trained on"""
    rest: tuple[Trajectory, ...] = ()
    """logged runs that cannot train a policy gradient, for imitation and preferences"""
    pairs: tuple[RunPair, ...] = ()
    pair_of: Callable[[Trajectory, Trajectory, BlobStore], RunPair | None] | None = None
    """makes a pair of (chosen, rejected); needed where there are `pairs`"""
    curriculum: Curriculum | None = None
    """chooses among `tasks` by their success so far; None takes them in seeded order"""
    reward: Reward | None = None
    """what runs earn; None: the rewards of the grader"""
    held_out: tuple[Task, ...] = ()
    """tasks that are measured during the training and never trained on"""

    @property
    def every_task(self) -> Sequence[Task]:
        of_rest = tuple({run.task.id: run.task for run in self.rest}.values())
        return self.tasks or LoggedTasks(self.logged) or of_rest

    @property
    def from_logs(self) -> bool:
        return bool(self.logged or self.rest)

    @property
    def hash(self) -> str:
        """Content hash of the task ids in order; the same for every log, since logs grow (see `only`)."""
        return content_hash("log" if self.from_logs else [task.id for task in self.tasks])

    def logged_runs(self) -> dict[str, Any]:
        """The logged runs by id, as JSON for the saved state; `only` finds them again."""
        return {
            "groups": [[member.id for member in group.members] for group in self.logged if group.members],
            "environments": [group.task_key for group in self.logged if not group.members],
            "born": dict(self.policy_versions),
            "learned_from": sorted(self.learned_from),
            "rest": [t.id for t in self.rest],
            "pairs": [[str(p.chosen_run), str(p.rejected_run)] for p in self.pairs],
        }

    def only(self, taken: Mapping[str, Any], blobs: BlobStore) -> Sources:
        """The sources restricted to `taken` (`logged_runs`): the log may have grown since, also by this
        training. Raises CheckpointError if one of the runs is missing or damaged."""
        runs: Sequence[Sequence[str]] = taken["groups"]
        group_of = members_of(self.logged)
        missing = [run for group in runs for run in group if run not in group_of]
        if missing:
            raise CheckpointError(
                f"the training began with {sum(map(len, runs))} logged runs, of which the log admits"
                f" {len(missing)} no longer ({missing[0]} is one); use the same log, or another --name"
            )
        tasks = {g.task_key: g for g in self.logged if isinstance(g, LoggedGroup)}
        lost = [key for key in taken["environments"] if key not in tasks]
        if lost:
            raise CheckpointError(
                f"the training began with {len(taken['environments'])} logged tasks without a run that may"
                f" train, of which the log holds {len(lost)} no longer; use the same log, or another --name"
            )
        rest = {t.id: t for t in self.rest}
        missing = [run for run in taken["rest"] if run not in rest]
        missing += [run for pair in taken["pairs"] for run in pair if run not in rest and run not in group_of]
        if missing:
            raise CheckpointError(
                f"the training began with runs to imitate or compare of which the log gives {len(missing)} no"
                f" longer ({missing[0]} is one); use the same log, or another --name"
            )

        def whole(run: str) -> Trajectory:
            if run in rest:
                return rest[run]
            group = group_of[run].only([run]).load()
            if group is None:
                raise CheckpointError(
                    f"run {run}, which the training compares, is damaged in the log by now; put the log back,"
                    " or give another --name"
                )
            return group.trajectories[0]

        return replace(
            self,
            logged=(
                *(group_of[group[0]].only(group) for group in runs),
                *(tasks[key].environment() for key in taken["environments"]),
            ),
            policy_versions=taken["born"],
            learned_from=frozenset(taken["learned_from"]),
            rest=tuple(rest[run] for run in taken["rest"]),
            # pairing a log that has grown would give other pairs
            pairs=tuple(
                pair
                for one, other in taken["pairs"]
                if self.pair_of and (pair := self.pair_of(whole(one), whole(other), blobs))
            ),
        )


class TaskOrder:
    """Draws tasks in epochs: each task once, in a seeded permutation, before any is repeated."""

    def __init__(self, keys: Sequence[str], seed: int) -> None:
        self._keys = tuple(keys)
        self._seed = seed
        self._epoch = -1
        self._left: list[int] = []
        """indices into `keys` that are left in this epoch, in order"""

    def draw(self, count: int, *, taken: Container[str] = ()) -> list[int]:
        """Indices of the next `count` tasks, all different and none in `taken`; fewer if the pool is smaller.
        A task that is passed over comes first in the next draw."""
        free = sum(key not in taken for key in self._keys)
        drawn: list[int] = []
        passed: list[int] = []
        while len(drawn) < min(count, free):
            if not self._left:
                self._epoch += 1
                self._left = list(range(len(self._keys)))
                Random(f"{self._seed} {self._epoch}").shuffle(self._left)
            place = self._left.pop(0)
            if place in drawn or self._keys[place] in taken:
                passed.append(place)
            else:
                drawn.append(place)
        self._left = [*passed, *self._left]
        return drawn

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "left": list(self._left)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._left = int(state["epoch"]), [int(place) for place in state["left"]]


MIX = 0.5
"""largest share of logged runs in a group that is topped up with fresh rollouts; when the logged runs of a
task are used up, it continues with fresh ones alone"""
LARGEST_GROUP = 16
"""without fresh rollouts: largest number of logged runs of a task in one step"""


class Gatherer:
    """Gathers the groups of each step. The same seed, weights and state give the same groups."""

    def __init__(self, sources: Sources, config: TrainConfig, roll_out: RollOut = collect) -> None:
        self._roll_out = partial(roll_out, reflect=config.reflect) if config.reflect else roll_out
        self._sources, self._config, self._objective = sources, config, config.objective.terms
        items = [g.task_key for g in sources.logged] or [t.key for t in sources.tasks]
        self._order = TaskOrder(items, config.seed)
        self._replay: tuple[ReplayBuffer, TaskBackoff] | None = None
        if sources.from_logs:
            buffer = ReplayBuffer(
                sources.logged, uses=config.logs.uses, max_staleness=config.objective.max_staleness,
                seed=config.seed, policy_versions=sources.policy_versions, learned_from=sources.learned_from,
            )  # fmt: skip
            self._replay = buffer, TaskBackoff()

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to release here; a subclass ends its rollouts."""

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> RolloutBatch:
        """The groups of one step: logged, logged and topped up with fresh rollouts, or fresh. Raises
        PolicyError or SandboxError if every fresh rollout failed for a reason that is not the policy's.

        Metrics: `refill_rounds` and `refill_groups`, groups in place of those without a signal; for logs
        those of `_logged`.
        """
        batch = (
            self._logged(*self._replay, runtime, step, version, on_run)
            if self._replay
            else self._fresh(runtime, step, on_run)
        )
        fresh = [run for group in batch.groups for run in group.trajectories if run.id not in batch.logged]
        if fresh and all(map(failed, fresh)):
            raise none_graded(fresh)
        return batch

    def _fresh(self, runtime: Runtime, step: int, on_run: OnRun | None) -> RolloutBatch:
        credited: list[CreditedGroup] = []
        wanted = self._config.prompts_per_step
        rounds = 0
        tasks = self._initial_tasks(step)
        while tasks:
            missing = {task.key: self._config.group_size for task in tasks}
            fresh = self._roll_each(tasks, missing, runtime, step, on_run)
            credited += self._credit(form_groups(run for runs in fresh.values() for run in runs))
            rounds += 1
            if rounds > self._config.refill:
                break
            of_tasks = [c for c in credited if not c.group.forked]
            live = sum(c.has_signal for c in of_tasks)
            tasks = self._draw(step, wanted - live, taken=[c.group.task_key for c in of_tasks])
        first = sum(not c.group.forked for c in credited)
        refilled = float(max(0, rounds - 1)), float(max(0, first - wanted))
        metrics = dict(zip(("refill_rounds", "refill_groups"), refilled, strict=True))
        return RolloutBatch(credited=credited, metrics=metrics)

    def record(self, credited: Sequence[CreditedGroup]) -> dict[str, float]:
        """Update the choice of tasks by the outcomes of a step. Returns metrics of the curriculum."""
        if self._replay:
            scored = [
                c for c in credited if not c.group.forked and not all(map(math.isnan, c.group.rewards_G))
            ]
            self._replay[1].record(
                {c.group.task_key: c.has_signal for c in scored},
                [c.group.task_key for c in scored if all(reward >= 1 for reward in c.group.rewards_G)],
            )
        curriculum = self._sources.curriculum
        if curriculum is None:
            return {}
        _ask(curriculum, "record", [c.group for c in credited])
        return curriculum_metrics(curriculum)

    def state(self) -> dict[str, Any]:
        curriculum = self._sources.curriculum
        buffer, backoff = self._replay or (None, None)
        return {
            "order": self._order.state(),
            "curriculum": curriculum_state(curriculum) if curriculum else None,
            "curriculum_kind": type(curriculum).__name__,
            "buffer": buffer.state() if buffer else None,
            "rests": backoff.state() if backoff else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`. Raises CheckpointError if it was another curriculum, or none."""
        self._order.restore(state["order"])
        if self._replay:
            self._replay[0].restore(state["buffer"])
            self._replay[1].restore(state["rests"])
        curriculum = self._sources.curriculum
        kind = type(curriculum).__name__
        if (began := state.get("curriculum_kind", kind)) != kind:
            had = "without --curriculum" if began == "NoneType" else f"with the curriculum {began}"
            raise CheckpointError(
                f"the training began {had}; give the same, or start anew under another --name"
            )
        if curriculum is not None:
            _ask(curriculum, "restore", state["curriculum"])

    def seed(self, step: int) -> int:
        return self._config.seed * 1_000_003 + step

    def _credit(self, groups: Sequence[Group]) -> list[CreditedGroup]:
        return [credit_group(group, self._objective, self._sources.reward) for group in groups]

    def _initial_tasks(self, step: int) -> list[Task]:
        return self._draw(step, self._config.prompts_per_step, taken=())

    def _draw(self, step: int, count: int, *, taken: Collection[str]) -> list[Task]:
        if (curriculum := self._sources.curriculum) is not None:
            return draw_tasks(curriculum, self._sources.tasks, step, count, taken=taken) if count else []
        return [self._sources.tasks[place] for place in self._order.draw(count, taken=taken)]

    def _logged(
        self, buffer: ReplayBuffer, backoff: TaskBackoff, runtime: Runtime, step: int, version: int,
        on_run: OnRun | None,
    ) -> RolloutBatch:  # fmt: skip
        """With fresh rollouts: groups of `group_size` runs, at most the share MIX of them logged. Without:
        the logged runs of each task, in parts of at most LARGEST_GROUP."""
        size, wanted = self._config.group_size, self._config.prompts_per_step
        if size and self._sources.logged and self._no_signal_left(backoff):
            return RolloutBatch(credited=[], exhausted=True)
        most = max(1, round(MIX * size)) if size else LARGEST_GROUP
        drawn = buffer.draw(wanted, most, version, even=not size)
        groups = self._top_up_groups(drawn, backoff, runtime, step, on_run) if size else drawn
        logged = {t.id: buffer.policy_versions[t.id] for group in drawn for t in group.trajectories}
        runs = sum(len(group.trajectories) for group in groups)
        ages = [version - sampled_at for sampled_at in logged.values()]
        metrics = {
            "refill_rounds": 0.0,
            "refill_groups": 0.0,
            "logged_runs": float(len(logged)),
            "fresh_runs": float(runs - len(logged)),
            "log_share": len(logged) / max(1, runs),
            "log_left": float(buffer.left(version)),
            "too_old": float(buffer.too_old(version)),
            "log_damaged": float(len(buffer.damaged)),
            **({"age_mean": sum(ages) / len(ages), "age_max": float(max(ages))} if ages else {}),
        }
        if size:
            keys = self._keys
            metrics["tasks"] = float(len(keys))
            metrics["tasks_resting"] = float(len(backoff.resting & set(keys)))
            metrics["tasks_solved"] = float(backoff.solved(keys))
        return RolloutBatch(
            credited=self._credit(groups), metrics=metrics, logged=logged,
            exhausted=bool(self._sources.logged) and not groups,
        )  # fmt: skip

    @property
    def _keys(self) -> list[str]:
        return [group.task_key for group in self._sources.logged if not group.forked]

    def _no_signal_left(self, backoff: TaskBackoff) -> bool:
        """True if no task has a signal any more. Raises GuardTripped if none ever had one."""
        keys = self._keys
        if not keys or not backoff.exhausted(keys):
            return False
        if backoff.any_signal:
            return True
        solved, size = backoff.solved(keys), self._config.group_size
        raise GuardTripped(
            f"nothing can be learned from the {len(keys)} logged tasks: {solved} are solved in all of {size}"
            f" rollouts, and those of each of the other {len(keys) - solved} all earned the same, while a"
            " policy gradient needs a task that is solved now and then; log runs of "
            + ("harder" if solved == len(keys) else "easier")
            + " tasks, give a larger --fresh, or imitate what passed: nano-rl sft --from-logs"
        )

    def _top_up_groups(
        self, drawn: list[Group], backoff: TaskBackoff, runtime: Runtime, step: int, on_run: OnRun | None
    ) -> list[Group]:
        """Top up the logged groups with fresh rollouts to `group_size`, and add groups of fresh rollouts of
        other tasks up to `prompts_per_step`. Groups of forks stay as they are: a fresh rollout cannot start
        at their step."""
        keys = {group.task_key for group in drawn}
        resting = keys | backoff.resting
        others = self._order.draw(self._config.prompts_per_step - len(drawn), taken=resting)
        if not (drawn or others):  # all tasks are backing off
            others = self._order.draw(self._config.prompts_per_step)
        known = {group.task_key: group for group in drawn if not group.forked}
        added = [self._sources.logged[place] for place in others]
        tasks = [group.task for group in (*known.values(), *added) if not group.forked]
        had = {key: group.trajectories for key, group in known.items()}
        missing = {task.key: self._config.group_size - len(had.get(task.key, ())) for task in tasks}
        fresh = self._roll_each(tasks, missing, runtime, step, on_run)
        filled = [
            Group(task_key=task.key, trajectories=(*had.get(task.key, ()), *fresh[task.key]))
            for task in tasks
        ]
        earlier = form_groups(run for key, runs in fresh.items() if key not in missing for run in runs)
        return [*filled, *earlier, *(group for group in drawn if group.forked)]

    def _roll_each(
        self, tasks: Sequence[Task], missing: Mapping[str, int], runtime: Runtime, step: int,
        on_run: OnRun | None,
    ) -> dict[str, list[Trajectory]]:  # fmt: skip
        """`missing[task.key]` fresh rollouts of each task, those of earlier tasks and second attempts, by the
        key of their group."""
        sizes = [missing[task.key] for task in tasks]
        runs = self._roll_out(
            tasks, runtime, group_size=sizes, seed=self.seed(step), on_run=on_run, reward=self._sources.reward
        )
        return by_group(tasks, runs)


GATHERERS: Extensions[Callable[..., Gatherer]] = Extensions("nano.gatherers")
"""(sources, opened weights, runtime, config, folder, what is told of changes) -> a gatherer"""


CONTROLS: Extensions[Callable[..., list[Trajectory]]] = Extensions("nano.controls")
"""(sources, runtime, config, *, step, rollouts, on_run) -> rollouts that measure hacking"""


def by_group(tasks: Sequence[Task], runs: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    found: dict[str, list[Trajectory]] = {task.key: [] for task in tasks}
    for run in runs:
        found.setdefault(run.group_key, []).append(run)
    return found


def refuse_trained(sources: Sources) -> None:
    unseen = {task.id for task in sources.held_out}
    if both := unseen and unseen & {task.id for task in sources.every_task}:
        raise UsageError(
            f"{len(both)} of the {len(unseen)} held-out tasks are among those trained on; make them"
            " with --split test"
        )


class ReplayBuffer:
    def __init__(
        self, groups: Sequence[Group | LoggedGroup], *, uses: int | None, max_staleness: int | None,
        seed: int, policy_versions: Mapping[str, int] | None = None, learned_from: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`policy_versions` maps runs to the policy version that sampled them; without one that of the oldest
        turn counts. `learned_from` are runs that have been used once already. `uses` None: no limit."""
        self._groups = {group.task_key: group for group in groups}
        self._members = {key: group.members for key, group in self._groups.items()}
        self._limit, self._max_staleness, self._seed = uses, max_staleness, seed
        given = policy_versions or {}
        self.policy_versions = {
            m.id: given.get(m.id, m.version) for members in self._members.values() for m in members
        }
        """run -> version of the policy that sampled it"""
        self.damaged: set[str] = set()
        """runs that were drawn and cannot be trained on, because of their tokens"""
        self._uses = {run: 1 for run in self.policy_versions if run in learned_from}
        self._round = -1
        self._queue: list[str] = []

    def draw(self, count: int, most: int, version: int, *, even: bool = False) -> list[Group]:
        """Groups of at most `most` logged runs, of at most `count` different tasks; `even` splits the runs of
        a task into chunks of nearly equal size and takes one."""
        drawn: list[Group] = []
        passed: list[str] = []
        while len(drawn) < count:
            if not self._queue and not self._next_round(version, passed, drawn):
                break
            key = self._queue.pop(0)
            if any(group.task_key == key for group in drawn):
                passed.append(key)
                continue
            runs = self._available(key, version)
            if runs:
                take = math.ceil(len(runs) / math.ceil(len(runs) / most)) if even else most
                group = self._loaded(key, [run.id for run in runs[:take]])
                drawn += [group] if group else []
        self._queue = [*passed, *self._queue]
        for group in drawn:
            for run in group.trajectories:
                self._uses[run.id] = self._uses.get(run.id, 0) + 1
        return drawn

    def left(self, version: int) -> int:
        """Number of runs that may still be taken at that version of the policy."""
        return sum(self._unused(run) and self._recent(run, version) for run in self.policy_versions)

    def too_old(self, version: int) -> int:
        """Number of runs that could still be taken if they were not too old."""
        return sum(self._unused(run) and not self._recent(run, version) for run in self.policy_versions)

    def state(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "queue": list(self._queue),
            "uses": dict(self._uses),
            "damaged": sorted(self.damaged),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._round, self._queue = int(state["round"]), [str(key) for key in state["queue"]]
        self._uses = {str(run): int(count) for run, count in state["uses"].items()}
        self.damaged = set(state.get("damaged", ()))

    def _next_round(self, version: int, passed: Sequence[str], drawn: Sequence[Group]) -> bool:
        """Queue all tasks with runs left in a new order; False if each of them has been drawn already."""
        done = {*passed, *(group.task_key for group in drawn)}
        keys = [key for key in self._groups if self._available(key, version)]
        if not set(keys) - done:
            return False
        self._round += 1
        Random(f"replay {self._seed} {self._round}").shuffle(keys)
        self._queue = keys
        return True

    def _loaded(self, key: str, runs: Sequence[str]) -> Group | None:
        """The runs loaded with their tokens, without damaged ones; None if all are damaged."""
        group = self._groups[key].only(runs).load()
        self.damaged |= set(runs) - {run.id for run in group.trajectories} if group else set(runs)
        return group

    def _available(self, key: str, version: int) -> list[GroupMember]:
        """The runs of a task that may be taken: least used first, then newest first."""
        runs = [m for m in self._members[key] if self._unused(m.id) and self._recent(m.id, version)]
        return sorted(
            runs, key=lambda m: (self._uses.get(m.id, 0), -self.policy_versions[m.id], -m.started, m.id)
        )

    def _unused(self, run: str) -> bool:
        used_up = self._limit is not None and self._uses.get(run, 0) >= self._limit
        return not used_up and run not in self.damaged

    def _recent(self, run: str, version: int) -> bool:
        return self._max_staleness is None or version - self.policy_versions[run] <= self._max_staleness


class TaskBackoff:
    """Exponential backoff of logged tasks: a task whose group had no signal is left out for 1 step, then for
    2, 4, 8 and at most 16, until a group of it has a signal."""

    def __init__(self) -> None:
        self._step = 0
        self._streak: dict[str, int] = {}
        """task -> number of its latest groups in a row without a signal"""
        self._until: dict[str, int] = {}
        """task -> step from which it may be drawn again"""
        self._passed: set[str] = set()
        """tasks whose latest rollouts all earned the full reward"""
        self.any_signal = False
        """True once any group had a signal"""

    @property
    def resting(self) -> set[str]:
        return {key for key, until in self._until.items() if until > self._step}

    def solved(self, keys: Collection[str]) -> int:
        return len(self._passed & set(keys))

    def exhausted(self, keys: Collection[str]) -> bool:
        """True if every task is solved or had no signal in its latest two groups."""
        return all(key in self._passed or self._streak.get(key, 0) > 1 for key in keys)

    def record(self, live: Mapping[str, bool], passed: Collection[str]) -> None:
        """Record a step: whether the group of each task had a signal, and the tasks solved in all
        rollouts."""
        self._step += 1
        for key, has_signal in live.items():
            self._streak[key] = 0 if has_signal else self._streak.get(key, 0) + 1
            self._until[key] = self._step + (1 << min(self._streak[key], 5)) // 2
            self.any_signal |= has_signal
        self._passed = (self._passed - set(live)) | set(passed)

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "streak": dict(self._streak), "until": dict(self._until),
                "passed": sorted(self._passed), "signal": self.any_signal}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step, self.any_signal = state["step"], state["signal"]
        self._streak, self._until = dict(state["streak"]), dict(state["until"])
        self._passed = set(state["passed"])
