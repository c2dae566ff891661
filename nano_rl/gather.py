"""Where the groups of a step come from: fresh rollouts, the log, or the log topped up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nano_coder.runtime import Runtime
from nano_rl.config import TrainConfig
from nano_rl.credit import has_signal
from nano_rl.curriculum import Curriculum
from nano_rl.group import Group, form_groups
from nano_rl.order import Order
from nano_rl.rewards import Reward
from nano_rl.rollout import OnRun, collect
from nano_shared.errors import CheckpointError
from nano_shared.hashing import content_hash
from nano_shared.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where groups come from: tasks to roll out afresh, logged groups, or both."""

    tasks: tuple[Task, ...] = ()
    logged: tuple[Group, ...] = ()
    curriculum: Curriculum | None = None
    """chooses among `tasks` by their success so far; None takes them in turn"""

    @property
    def every_task(self) -> tuple[Task, ...]:
        return self.tasks or tuple(g.trajectories[0].task for g in self.logged)

    @property
    def hash(self) -> str:
        """Of the tasks in order; of a log it says no more than that it is one, since logs grow (`only`)."""
        return content_hash("log" if self.logged else [task.id for task in self.tasks])

    def logged_runs(self) -> list[list[str]]:
        """The ids of the runs of each logged group, to be found again by `only`."""
        return [[t.id for t in group.trajectories] for group in self.logged]

    def only(self, runs: Sequence[Sequence[str]]) -> Sources:
        """The same, with those runs of the log alone: the log may have grown since, also by this training.

        Raises CheckpointError where one of them is gone.
        """
        by_id = {t.id: t for group in self.logged for t in group.trajectories}
        missing = [run for group in runs for run in group if run not in by_id]
        if missing:
            raise CheckpointError(
                f"the training began with {sum(map(len, runs))} logged runs, of which the log admits"
                f" {len(missing)} no longer ({missing[0]} is one); use the same log, or another --name"
            )
        groups = ([by_id[run] for run in group] for group in runs)
        return replace(
            self, logged=tuple(Group(task_key=g[0].task.key, trajectories=tuple(g)) for g in groups)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The groups of one step, those without a signal too: a reward's mean is over all that were tried."""

    groups: list[Group]
    refill_rounds: int = 0
    refill_groups: int = 0
    """groups rolled out beyond the step's own, in place of some without a signal"""

    @property
    def metrics(self) -> dict[str, float]:
        """`refill_rounds` and `refill_groups`."""
        return {"refill_rounds": float(self.refill_rounds), "refill_groups": float(self.refill_groups)}


class Gatherer:
    """Chooses what each step learns from. The same seed, weights and state gather the same groups."""

    def __init__(self, sources: Sources, config: TrainConfig, reward: Reward | None = None) -> None:
        self._sources = sources
        self._config = config
        self._reward = reward
        items = [g.task_key for g in sources.logged] or [t.key for t in sources.tasks]
        self._order = Order(items, config.seed)

    def gather(self, runtime: Runtime, step: int, on_run: OnRun | None = None) -> Gathered:
        """The groups of one step: logged, topped up with fresh rollouts of the same tasks, or fresh alone."""
        if self._sources.logged:
            return Gathered(groups=self._logged(runtime, step, on_run))
        groups: list[Group] = []
        wanted = self._config.prompts_per_step
        rounds = 0
        while rounds <= self._config.refill:
            live = sum(has_signal(g, self._config.objective, self._reward) for g in groups)
            tasks = self._draw(step, wanted - live, taken=[g.task_key for g in groups])
            if not tasks:
                break
            groups += self._roll(tasks, runtime, step, on_run)
            rounds += 1
        return Gathered(
            groups=groups, refill_rounds=max(0, rounds - 1), refill_groups=max(0, len(groups) - wanted)
        )

    def record(self, groups: Sequence[Group]) -> dict[str, float]:
        """Learn from the outcomes of a step which tasks to choose; metrics of the choice."""
        curriculum = self._sources.curriculum
        if curriculum is None:
            return {}
        curriculum.record(groups)
        return curriculum.metrics()

    def state(self) -> dict[str, Any]:
        """Everything that going on needs, as plain JSON."""
        curriculum = self._sources.curriculum
        return {"order": self._order.state(), "curriculum": curriculum.state() if curriculum else None}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. Raises CheckpointError where one had a curriculum and the other has none."""
        self._order.restore(state["order"])
        curriculum = self._sources.curriculum
        if (curriculum is None) != (state["curriculum"] is None):
            had = "without" if state["curriculum"] is None else "with"
            raise CheckpointError(
                f"the training began {had} --curriculum; give the same, or start anew under another --name"
            )
        if curriculum is not None:
            curriculum.restore(state["curriculum"])

    def _draw(self, step: int, count: int, *, taken: Collection[str]) -> list[Task]:
        if self._sources.curriculum is not None:
            return self._sources.curriculum.draw(step, count, taken=taken) if count else []
        return [self._sources.tasks[place] for place in self._order.draw(count, taken=taken)]

    def _logged(self, runtime: Runtime, step: int, on_run: OnRun | None) -> list[Group]:
        chosen = [self._sources.logged[i] for i in self._order.draw(self._config.prompts_per_step)]
        if not self._config.group_size:
            return chosen
        fresh = self._roll([g.trajectories[0].task for g in chosen if not g.forked], runtime, step, on_run)
        more = {group.task_key: group.trajectories for group in fresh}
        return [replace(g, trajectories=(*g.trajectories, *more.get(g.task_key, ()))) for g in chosen]

    def _roll(self, tasks: Sequence[Task], runtime: Runtime, step: int, on_run: OnRun | None) -> list[Group]:
        """Fresh groups: the seed of each rollout is a function of the run's seed, the step and the task."""
        runs = collect(
            tasks,
            runtime,
            group_size=self._config.group_size,
            seed=self._config.seed * 1_000_003 + step,
            on_run=on_run,
            reward=self._reward,
        )
        return form_groups(runs)
