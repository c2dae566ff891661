"""Where the groups of a step come from: fresh rollouts, the log, or the log topped up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from nano_coder.run.execution import Runtime
from nano_rl.config.training import TrainConfig
from nano_rl.gather.curriculum import Curriculum
from nano_rl.gather.replay_buffer import ReplayBuffer
from nano_rl.gather.rollouts import OnRun, collect
from nano_rl.gather.task_order import Order, Rests
from nano_rl.learn.credit.baselines import Baselines
from nano_rl.learn.credit.turns import has_signal
from nano_rl.learn.rows.group import Group, form_groups
from nano_rl.logs.logged_group import LoggedGroup, LoggedTasks, members_of
from nano_rl.rewards import Reward
from nano_shared.blobs import BlobStore
from nano_shared.errors import CheckpointError, GuardTripped
from nano_shared.hashing import content_hash
from nano_shared.types import Task, Trajectory


class RunPair(Protocol):
    """Two runs of one task, of which one is preferred."""

    chosen_run: str | None
    rejected_run: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where groups come from: tasks to roll out afresh, logged groups, or both."""

    tasks: tuple[Task, ...] = ()
    logged: tuple[Group | LoggedGroup, ...] = ()
    born: Mapping[str, int] = field(default_factory=dict)
    """logged run -> version of the policy that sampled it, where its turns do not say it (`lineage.py`)"""
    learned_from: frozenset[str] = frozenset()
    """logged runs that the policy has learned from before"""
    rest: tuple[Trajectory, ...] = ()
    """logged runs that policy gradients may not use"""
    pairs: tuple[RunPair, ...] = ()
    """outcomes to compare beside the policy gradient"""
    pair_of: Callable[[Trajectory, Trajectory, BlobStore], RunPair | None] | None = None
    """makes the pair of two runs; needed where there are `pairs`"""
    curriculum: Curriculum | None = None
    """chooses among `tasks` by their success so far; None takes them in turn"""

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
        """Of the tasks in order; of a log it says no more than that it is one, since logs grow (`only`)."""
        return content_hash("log" if self.from_logs else [task.id for task in self.tasks])

    def logged_runs(self) -> dict[str, Any]:
        """What was taken of the log, by ids, to be found again by `only`."""
        return {
            "groups": [[member.id for member in group.members] for group in self.logged if group.members],
            "environments": [group.task_key for group in self.logged if not group.members],
            "born": dict(self.born),
            "learned_from": sorted(self.learned_from),
            "rest": [t.id for t in self.rest],
            "pairs": [[str(p.chosen_run), str(p.rejected_run)] for p in self.pairs],
        }

    def only(self, taken: Mapping[str, Any], blobs: BlobStore) -> Sources:
        """The same, with those runs of the log alone: the log may have grown since, also by this training.
        `blobs` are the log's.

        Raises CheckpointError where one of them is gone.
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
        gone = [run for run in taken["rest"] if run not in rest]
        gone += [run for pair in taken["pairs"] for run in pair if run not in rest and run not in group_of]
        if gone:
            raise CheckpointError(
                f"the training began with runs to imitate or compare of which the log gives {len(gone)} no"
                f" longer ({gone[0]} is one); use the same log, or another --name"
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
                *(tasks[key].bare() for key in taken["environments"]),
            ),
            born=taken["born"],
            learned_from=frozenset(taken["learned_from"]),
            rest=tuple(rest[run] for run in taken["rest"]),
            # a log that grew would be paired otherwise
            pairs=tuple(
                pair
                for one, other in taken["pairs"]
                if self.pair_of and (pair := self.pair_of(whole(one), whole(other), blobs))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The groups of one step, those without a signal too: a reward's mean is over all that were tried."""

    groups: list[Group]
    logged: Mapping[str, int] = field(default_factory=dict)
    """logged run of this step -> version of the policy that sampled it"""
    version: int = 0
    """of the policy that is trained"""
    left: int = 0
    """logged runs that later steps may take"""
    too_old: int = 0
    """logged runs that were never taken and have become too old"""
    damaged: int = 0
    """logged runs whose tokens, when they were to be taken, were not what their texts and template say"""
    from_logs: bool = False
    exhausted: bool = False
    """the logs had runs, and have none left to begin a step with; or no task of theirs has a signal left"""
    tasks: Mapping[str, float] = field(default_factory=dict)
    """`tasks`, `tasks_resting` and `tasks_solved` of a log whose groups are filled up"""
    refill_rounds: int = 0
    refill_groups: int = 0
    """groups rolled out beyond the step's own, in place of some without a signal"""
    behind: int | None = None
    """versions between the policy that sampled the rollouts ahead of time (`overlap/`) and the one that is
    trained; None where it sampled them itself"""
    restarts: int = 0
    """rollout workers that were replaced on the way"""
    sampled_by: Mapping[str, Tensor] | None = None
    """the weights that sampled the rollouts ahead of time, where the policy has moved since"""
    seen: Mapping[str, float] = field(default_factory=dict)
    """what the worker's policy said of a probe (`overlap/`)"""

    @property
    def metrics(self) -> dict[str, float]:
        """`refill_rounds` and `refill_groups`; of rollouts ahead of time `staleness` (versions),
        `stale_tokens`, `worker_restarts` and `worker_mismatch`; of logs `logged_runs`, `fresh_runs`,
        `log_share` (logged ones of all), `log_left`, `too_old`, `log_damaged`, and `age_mean` and `age_max`
        of the logged ones, in updates."""
        values = {"refill_rounds": float(self.refill_rounds), "refill_groups": float(self.refill_groups)}
        if self.behind is not None:
            sampled = sum(run.num_sampled_tokens for group in self.groups for run in group.trajectories)
            values["staleness"] = float(self.behind)
            values["stale_tokens"] = float(sampled if self.behind else 0)
            values["worker_restarts"] = float(self.restarts)
            values |= self.seen
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
        ages = [self.version - born for born in self.logged.values()]
        return {**values, "age_mean": sum(ages) / len(ages), "age_max": float(max(ages))} if ages else values


class Gatherer:
    """Chooses what each step learns from. The same seed, weights and state gather the same groups."""

    def __init__(self, sources: Sources, config: TrainConfig, reward: Reward | None = None) -> None:
        self.baselines = Baselines()
        self._sources = sources
        self._buffer = ReplayBuffer(
            sources.logged,
            uses=config.logs.uses,
            max_staleness=config.objective.max_staleness,
            seed=config.seed,
            born=sources.born,
            learned_from=sources.learned_from,
        )
        self._config = config
        self._reward = reward
        items = [g.task_key for g in sources.logged] or [t.key for t in sources.tasks]
        self._order = Order(items, config.seed)
        self._rests = Rests()

    def __enter__(self) -> Gatherer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What gathers ahead of time ends here; the others hold nothing."""

    def gather(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None = None) -> Gathered:
        """The groups of one step: logged, topped up with fresh rollouts of the same tasks, or fresh alone.

        `version` is that of the policy which is trained.
        """
        if self._sources.from_logs:
            return self._logged(runtime, step, version, on_run)
        groups: list[Group] = []
        wanted = self._config.prompts_per_step
        rounds = 0
        tasks = self._first(step)
        while tasks:
            groups += self._roll(tasks, runtime, step, on_run)
            rounds += 1
            if rounds > self._config.refill:
                break
            live = sum(has_signal(g, self._config.objective, self._reward) for g in groups)
            tasks = self._draw(step, wanted - live, taken=[g.task_key for g in groups])
        return Gathered(
            groups=groups, refill_rounds=max(0, rounds - 1), refill_groups=max(0, len(groups) - wanted)
        )

    def record(self, groups: Sequence[Group]) -> dict[str, float]:
        """Learn from the outcomes of a step which tasks to choose, and what to compare the next ones with;
        metrics of the choice."""
        self.baselines.record(groups, self._config.objective)
        whole = [g for g in groups if not g.forked and not all(map(math.isnan, g.rewards_G))]
        self._rests.record(
            {g.task_key: has_signal(g, self._config.objective, self._reward) for g in whole},
            [g.task_key for g in whole if all(reward >= 1 for reward in g.rewards_G)],
        )
        curriculum = self._sources.curriculum
        if curriculum is None:
            return {}
        curriculum.record(groups)
        return curriculum.metrics()

    def state(self) -> dict[str, Any]:
        """Everything that going on needs, as plain JSON."""
        curriculum = self._sources.curriculum
        return {
            "order": self._order.state(),
            "curriculum": curriculum.state() if curriculum else None,
            "buffer": self._buffer.state(),
            "baselines": self.baselines.state(),
            "rests": self._rests.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. Raises CheckpointError where one had a curriculum and the other has none."""
        self._order.restore(state["order"])
        self._buffer.restore(state["buffer"])
        self.baselines.restore(state["baselines"])
        self._rests.restore(state["rests"])
        curriculum = self._sources.curriculum
        if (curriculum is None) != (state["curriculum"] is None):
            had = "without" if state["curriculum"] is None else "with"
            raise CheckpointError(
                f"the training began {had} --curriculum; give the same, or start anew under another --name"
            )
        if curriculum is not None:
            curriculum.restore(state["curriculum"])

    def seed(self, step: int) -> int:
        """Of the rollouts of a step; that of each is a function of it, the task and its place among them."""
        return self._config.seed * 1_000_003 + step

    def _first(self, step: int) -> list[Task]:
        """The tasks that a step begins with."""
        return self._draw(step, self._config.prompts_per_step, taken=())

    def _draw(self, step: int, count: int, *, taken: Collection[str]) -> list[Task]:
        if self._sources.curriculum is not None:
            return self._sources.curriculum.draw(step, count, taken=taken) if count else []
        return [self._sources.tasks[place] for place in self._order.draw(count, taken=taken)]

    def _logged(self, runtime: Runtime, step: int, version: int, on_run: OnRun | None) -> Gathered:
        """Groups of at most `group_size` runs, of which at most the share `mix` is logged; without fresh
        rollouts, whatever the logs have of each task, in parts of `largest_group`."""
        logs, size, wanted = self._config.logs, self._config.group_size, self._config.prompts_per_step
        if size and self._sources.logged and self._nothing_left():
            return Gathered(groups=[], from_logs=True, exhausted=True)
        most = max(1, round(logs.mix * size)) if size else logs.largest_group
        drawn = self._buffer.draw(wanted, most, version, even=not size)
        groups = self._filled(drawn, runtime, step, on_run) if size else drawn
        return Gathered(
            groups=groups,
            logged={t.id: self._buffer.born[t.id] for group in drawn for t in group.trajectories},
            version=version,
            left=self._buffer.left(version),
            too_old=self._buffer.too_old(version),
            damaged=len(self._buffer.damaged),
            from_logs=True,
            exhausted=bool(self._sources.logged) and not groups,
            tasks=self._told_of_tasks() if size else {},
        )

    @property
    def _keys(self) -> list[str]:
        """Tasks that fresh rollouts may be made of."""
        return [group.task_key for group in self._sources.logged if not group.forked]

    def _told_of_tasks(self) -> dict[str, float]:
        keys = self._keys
        return {
            "tasks": float(len(keys)),
            "tasks_resting": float(len(self._rests.resting & set(keys))),
            "tasks_solved": float(self._rests.solved(keys)),
        }

    def _nothing_left(self) -> bool:
        """Whether no task has a signal any more. Raises GuardTripped where none ever had one."""
        keys = self._keys
        if not keys or not self._rests.spent(keys):
            return False
        if self._rests.signal:
            return True
        solved, size = self._rests.solved(keys), self._config.group_size
        raise GuardTripped(
            f"nothing can be learned from the {len(keys)} logged tasks: {solved} are solved in all of {size}"
            f" rollouts, and those of each of the other {len(keys) - solved} all earned the same, while a"
            " policy gradient needs a task that is solved now and then; log runs of "
            + ("harder" if solved == len(keys) else "easier")
            + " tasks, give a larger --fresh, or imitate what passed: nano-rl sft --from-logs"
        )

    def _filled(self, drawn: list[Group], runtime: Runtime, step: int, on_run: OnRun | None) -> list[Group]:
        """Logged groups with fresh rollouts up to `group_size`, and tasks without logged runs in place of
        those that are missing. Forks begin where no fresh rollout does, and stay as they are."""
        keys = {group.task_key for group in drawn}
        resting = keys | self._rests.resting
        others = self._order.draw(self._config.prompts_per_step - len(drawn), taken=resting)
        if not (drawn or others):  # all of them rest
            others = self._order.draw(self._config.prompts_per_step)
        held = {group.task_key: group for group in drawn if not group.forked}
        bare = [self._sources.logged[place] for place in others]
        tasks = [group.task for group in (*held.values(), *bare) if not group.forked]
        missing = {
            task.key: self._config.group_size - len(held[task.key].trajectories if task.key in held else ())
            for task in tasks
        }
        fresh = self._roll_each(tasks, missing, runtime, step, on_run)
        filled = [
            Group(
                task_key=task.key,
                trajectories=(*(held[task.key].trajectories if task.key in held else ()), *fresh[task.key]),
            )
            for task in tasks
        ]
        return [*filled, *(group for group in drawn if group.forked)]

    def _roll(self, tasks: Sequence[Task], runtime: Runtime, step: int, on_run: OnRun | None) -> list[Group]:
        """Fresh groups of `group_size`."""
        missing = {task.key: self._config.group_size for task in tasks}
        fresh = self._roll_each(tasks, missing, runtime, step, on_run)
        return form_groups(run for task in tasks for run in fresh[task.key])

    def _roll_each(
        self,
        tasks: Sequence[Task],
        missing: Mapping[str, int],
        runtime: Runtime,
        step: int,
        on_run: OnRun | None,
    ) -> dict[str, list[Trajectory]]:
        """As many fresh rollouts of each task as are missing."""
        fresh: dict[str, list[Trajectory]] = {task.key: [] for task in tasks}
        runs = collect(
            tasks,
            runtime,
            group_size=[missing[task.key] for task in tasks],
            seed=self.seed(step),
            on_run=on_run,
            reward=self._reward,
        )
        for run in runs:
            fresh[run.task.key].append(run)
        return fresh
