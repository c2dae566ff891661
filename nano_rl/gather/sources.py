"""The groups of each step: from fresh rollouts, from logs, or from logs topped up with fresh rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from nano_coder.run.execution import Runtime
from nano_rl.config.training import TrainConfig
from nano_rl.gather.curriculum import Curriculum, TaskBackoff, TaskOrder
from nano_rl.gather.replay_buffer import ReplayBuffer
from nano_rl.gather.rollouts import OnRun, RollOut, collect
from nano_rl.learn.advantage import CreditedGroup, RunningBaselines, credit_group
from nano_rl.learn.rows.group import Group, form_groups
from nano_rl.logs.logged_group import LoggedGroup, LoggedTasks, members_of
from nano_rl.rewards import Reward
from nano_shared.blobs import BlobStore
from nano_shared.errors import CheckpointError, GuardTripped
from nano_shared.extensions import Extensions
from nano_shared.hashing import content_hash
from nano_shared.types import Task, Trajectory

if TYPE_CHECKING:
    from torch import nn

    from nano_coder.models.opening import OpenedWeights
    from nano_shared.store import LogStore


class RunPair(Protocol):
    """A preference between two runs of one task."""

    chosen_run: str | None
    rejected_run: str | None


class PairTerm(Protocol):
    """Pairs of logged runs, and the loss term on them: an extension of `nano.terms`, a module."""

    def pairs_beside(
        self, stores: Sequence[LogStore], rest: set[str], usable: set[str], config: TrainConfig
    ) -> tuple[RunPair, ...]:
        """Pairs of which one side cannot train a policy gradient; none if `logs.lambda_preference` is 0."""
        ...

    def pair_of(self, chosen: Trajectory, rejected: Trajectory, blobs: BlobStore) -> RunPair | None: ...

    def log_pairs(self, store: LogStore) -> Any:
        """`pairs`, each with `prompt`, `chosen` and `rejected` as messages, and `refused` by cause."""
        ...

    def preference_term(
        self, model: nn.Module, opened: OpenedWeights, pairs: Sequence[RunPair], config: TrainConfig
    ) -> Any:
        """A term of the loss, as `Updater.terms` takes them; None without pairs."""
        ...


PAIR_TERMS: Extensions[PairTerm] = Extensions("nano.terms")


def pair_term(config: TrainConfig) -> PairTerm | None:
    """What `logs.lambda_preference` needs; None where it is 0. Raises ConfigError if it is not installed."""
    return PAIR_TERMS.find("preferences") if config.logs.lambda_preference else None


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
    """preference pairs for `logs.lambda_preference`"""
    pair_of: Callable[[Trajectory, Trajectory, BlobStore], RunPair | None] | None = None
    """makes a pair of (chosen, rejected); needed where there are `pairs`"""
    curriculum: Curriculum | None = None
    """chooses among `tasks` by their success so far; None takes them in seeded order"""

    @property
    def every_task(self) -> Sequence[Task]:
        return self.tasks or LoggedTasks(self.logged) or self._of_rest

    @property
    def _of_rest(self) -> tuple[Task, ...]:
        return tuple({run.task.id: run.task for run in self.rest}.values())

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
        training. `blobs` are the log's.

        Raises CheckpointError if one of the runs is missing or damaged.
        """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The groups of one step with their credit, also those without a signal, and metrics about them."""

    credited: list[CreditedGroup]
    logged: Mapping[str, int] = field(default_factory=dict)
    """logged run of this step -> version of the policy that sampled it"""
    version: int = 0
    """version of the policy that is trained"""
    left: int = 0
    """logged runs that later steps may take"""
    too_old: int = 0
    """logged runs that were never taken and are too old now"""
    damaged: int = 0
    """logged runs that were left out because their tokens do not match their texts and template"""
    from_logs: bool = False
    exhausted: bool = False
    """the logs have no runs left for this step, or none of their tasks has a signal any more"""
    tasks: Mapping[str, float] = field(default_factory=dict)
    """`tasks`, `tasks_resting` and `tasks_solved` of a log whose groups are topped up"""
    refill_rounds: int = 0
    refill_groups: int = 0
    """groups rolled out in place of groups without a signal"""
    off_policy_steps: int | None = None
    """policy versions between sampling and training of rollouts made ahead; None without it"""
    restarts: int = 0
    """rollout workers that were replaced since the step before"""
    behaviour_weights: Mapping[str, Tensor] | None = None
    """the weights that sampled rollouts made ahead, if the policy has been updated since"""
    worker_metrics: Mapping[str, float] = field(default_factory=dict)
    """metrics of the worker's log-probs of the probe (`rollout_worker.py`)"""

    @property
    def groups(self) -> list[Group]:
        return [c.group for c in self.credited]

    @property
    def metrics(self) -> dict[str, float]:
        """`refill_rounds` and `refill_groups`; for rollouts made ahead `staleness` (versions),
        `stale_tokens`, `worker_restarts` and `worker_mismatch`; for logs `logged_runs`, `fresh_runs`,
        `log_share` (share of logged runs), `log_left`, `too_old`, `log_damaged`, and the age of the logged
        runs in updates, `age_mean` and `age_max`."""
        values = {"refill_rounds": float(self.refill_rounds), "refill_groups": float(self.refill_groups)}
        if self.off_policy_steps is not None:
            sampled = sum(run.num_sampled_tokens for group in self.groups for run in group.trajectories)
            values["staleness"] = float(self.off_policy_steps)
            values["stale_tokens"] = float(sampled if self.off_policy_steps else 0)
            values["worker_restarts"] = float(self.restarts)
            values |= self.worker_metrics
        if not self.from_logs:
            return values
        runs = sum(len(group.trajectories) for group in self.groups)
        values |= {
            "logged_runs": float(len(self.logged)),
            "fresh_runs": float(runs - len(self.logged)),
            "log_share": len(self.logged) / max(1, runs),
            "log_left": float(self.left),
            "too_old": float(self.too_old),
            "log_damaged": float(self.damaged),
            **self.tasks,
        }
        ages = [self.version - sampled_at for sampled_at in self.logged.values()]
        return {**values, "age_mean": sum(ages) / len(ages), "age_max": float(max(ages))} if ages else values


class Gatherer:
    """Gathers the groups of each step. The same seed, weights and state give the same groups."""

    def __init__(
        self, sources: Sources, config: TrainConfig, reward: Reward | None = None, roll_out: RollOut = collect
    ) -> None:
        self._roll_out = partial(roll_out, reflect=config.reflect) if config.reflect else roll_out
        self.baselines = RunningBaselines()
        self._sources = sources
        self._buffer = ReplayBuffer(
            sources.logged,
            uses=config.logs.uses,
            max_staleness=config.objective.max_staleness,
            seed=config.seed,
            policy_versions=sources.policy_versions,
            learned_from=sources.learned_from,
        )
        self._config = config
        self._reward = reward
        items = [g.task_key for g in sources.logged] or [t.key for t in sources.tasks]
        self._order = TaskOrder(items, config.seed)
        self._backoff = TaskBackoff()

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to release here; `OverlappedGatherer` ends its worker."""

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> Gathered:
        """The groups of one step: logged, logged and topped up with fresh rollouts, or fresh.

        `version` is the version of the trained policy.
        """
        if self._sources.from_logs:
            return self._logged(runtime, step, version, on_run)
        credited: list[CreditedGroup] = []
        wanted = self._config.prompts_per_step
        rounds = 0
        tasks = self._first(step)
        while tasks:
            credited += self._credit(self._roll(tasks, runtime, step, on_run))
            rounds += 1
            if rounds > self._config.refill:
                break
            of_tasks = [c for c in credited if not c.group.forked]
            live = sum(c.has_signal for c in of_tasks)
            tasks = self._draw(step, wanted - live, taken=[c.group.task_key for c in of_tasks])
        first = sum(not c.group.forked for c in credited)
        return Gathered(
            credited=credited, refill_rounds=max(0, rounds - 1), refill_groups=max(0, first - wanted)
        )

    def record(self, credited: Sequence[CreditedGroup]) -> dict[str, float]:
        """Update the running baselines and the choice of tasks by the outcomes of a step. Returns metrics of
        the curriculum."""
        groups = [c.group for c in credited]
        self.baselines.record(groups, self._config.objective)
        scored = [c for c in credited if not c.group.forked and not all(map(math.isnan, c.group.rewards_G))]
        self._backoff.record(
            {c.group.task_key: c.has_signal for c in scored},
            [c.group.task_key for c in scored if all(reward >= 1 for reward in c.group.rewards_G)],
        )
        curriculum = self._sources.curriculum
        if curriculum is None:
            return {}
        curriculum.record(groups)
        return curriculum.metrics()

    def state(self) -> dict[str, Any]:
        """The state as plain JSON, for `restore`."""
        curriculum = self._sources.curriculum
        return {
            "order": self._order.state(),
            "curriculum": curriculum.state() if curriculum else None,
            "buffer": self._buffer.state(),
            "baselines": self.baselines.state(),
            "rests": self._backoff.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`. Raises CheckpointError if a curriculum was added or removed since."""
        self._order.restore(state["order"])
        self._buffer.restore(state["buffer"])
        self.baselines.restore(state["baselines"])
        self._backoff.restore(state["rests"])
        curriculum = self._sources.curriculum
        if (curriculum is None) != (state["curriculum"] is None):
            had = "without" if state["curriculum"] is None else "with"
            raise CheckpointError(
                f"the training began {had} --curriculum; give the same, or start anew under another --name"
            )
        if curriculum is not None:
            curriculum.restore(state["curriculum"])

    def seed(self, step: int) -> int:
        """Seed of the rollouts of a step (`episode_seed` derives that of each rollout)."""
        return self._config.seed * 1_000_003 + step

    def _credit(self, groups: Sequence[Group]) -> list[CreditedGroup]:
        return [credit_group(group, self._config.objective, self._reward) for group in groups]

    def _first(self, step: int) -> list[Task]:
        """The tasks of a step before any refill."""
        return self._draw(step, self._config.prompts_per_step, taken=())

    def _draw(self, step: int, count: int, *, taken: Collection[str]) -> list[Task]:
        if self._sources.curriculum is not None:
            return self._sources.curriculum.draw(step, count, taken=taken) if count else []
        return [self._sources.tasks[place] for place in self._order.draw(count, taken=taken)]

    def _logged(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None) -> Gathered:
        """With fresh rollouts: groups of `group_size` runs, at most the share `mix` of them logged. Without:
        the logged runs of each task, in parts of at most `largest_group`."""
        logs, size, wanted = self._config.logs, self._config.group_size, self._config.prompts_per_step
        if size and self._sources.logged and self._no_signal_left():
            return Gathered(credited=[], from_logs=True, exhausted=True)
        most = max(1, round(logs.mix * size)) if size else logs.largest_group
        drawn = self._buffer.draw(wanted, most, version, even=not size)
        groups = self._filled(drawn, runtime, step, on_run) if size else drawn
        return Gathered(
            credited=self._credit(groups),
            logged={t.id: self._buffer.policy_versions[t.id] for group in drawn for t in group.trajectories},
            version=version,
            left=self._buffer.left(version),
            too_old=self._buffer.too_old(version),
            damaged=len(self._buffer.damaged),
            from_logs=True,
            exhausted=bool(self._sources.logged) and not groups,
            tasks=self._task_metrics() if size else {},
        )

    @property
    def _keys(self) -> list[str]:
        """Keys of the logged tasks that can be rolled out afresh."""
        return [group.task_key for group in self._sources.logged if not group.forked]

    def _task_metrics(self) -> dict[str, float]:
        keys = self._keys
        return {
            "tasks": float(len(keys)),
            "tasks_resting": float(len(self._backoff.resting & set(keys))),
            "tasks_solved": float(self._backoff.solved(keys)),
        }

    def _no_signal_left(self) -> bool:
        """True if no task has a signal any more. Raises GuardTripped if none ever had one."""
        keys = self._keys
        if not keys or not self._backoff.exhausted(keys):
            return False
        if self._backoff.any_signal:
            return True
        solved, size = self._backoff.solved(keys), self._config.group_size
        raise GuardTripped(
            f"nothing can be learned from the {len(keys)} logged tasks: {solved} are solved in all of {size}"
            f" rollouts, and those of each of the other {len(keys) - solved} all earned the same, while a"
            " policy gradient needs a task that is solved now and then; log runs of "
            + ("harder" if solved == len(keys) else "easier")
            + " tasks, give a larger --fresh, or imitate what passed: nano-rl sft --from-logs"
        )

    def _filled(self, drawn: list[Group], runtime: Runtime, step: int, on_run: OnRun | None) -> list[Group]:
        """Top up the logged groups with fresh rollouts to `group_size`, and add groups of fresh rollouts of
        other tasks up to `prompts_per_step`. Groups of forks stay as they are: a fresh rollout cannot start
        at their step."""
        keys = {group.task_key for group in drawn}
        resting = keys | self._backoff.resting
        others = self._order.draw(self._config.prompts_per_step - len(drawn), taken=resting)
        if not (drawn or others):  # all tasks are backing off
            others = self._order.draw(self._config.prompts_per_step)
        known = {group.task_key: group for group in drawn if not group.forked}
        added = [self._sources.logged[place] for place in others]
        tasks = [group.task for group in (*known.values(), *added) if not group.forked]
        missing = {
            task.key: self._config.group_size - len(known[task.key].trajectories if task.key in known else ())
            for task in tasks
        }
        fresh = self._roll_each(tasks, missing, runtime, step, on_run)
        filled = [
            Group(
                task_key=task.key,
                trajectories=(*(known[task.key].trajectories if task.key in known else ()), *fresh[task.key]),
            )
            for task in tasks
        ]
        earlier = form_groups(run for key, runs in fresh.items() if key not in missing for run in runs)
        return [*filled, *earlier, *(group for group in drawn if group.forked)]

    def _roll(self, tasks: Sequence[Task], runtime: Runtime, step: int, on_run: OnRun | None) -> list[Group]:
        """Groups of `group_size` fresh rollouts."""
        missing = {task.key: self._config.group_size for task in tasks}
        fresh = self._roll_each(tasks, missing, runtime, step, on_run)
        return form_groups(run for runs in fresh.values() for run in runs)

    def _roll_each(
        self,
        tasks: Sequence[Task],
        missing: Mapping[str, int],
        runtime: Runtime,
        step: int,
        on_run: OnRun | None,
    ) -> dict[str, list[Trajectory]]:
        """`missing[task.key]` fresh rollouts of each task, those of earlier tasks and second attempts, by the
        key of their group."""
        runs = self._roll_out(
            tasks,
            runtime,
            group_size=[missing[task.key] for task in tasks],
            seed=self.seed(step),
            on_run=on_run,
            reward=self._reward,
        )
        return by_group(tasks, runs)


def by_group(tasks: Sequence[Task], runs: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """The runs by `Trajectory.group_key`, those of `tasks` first."""
    found: dict[str, list[Trajectory]] = {task.key: [] for task in tasks}
    for run in runs:
        found.setdefault(run.group_key, []).append(run)
    return found
