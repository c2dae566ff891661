"""Evaluation: success on held-out tasks with confidence intervals, by level, paired against a baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.rewards import outcome
from nano_rl.statistics import paired_bootstrap, wilson
from nano_shared.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Success on one part of the tasks. Runs without a reward (failures of ours) are counted apart."""

    name: str
    successes: int
    graded: int
    ungraded: int
    low: float
    high: float
    """95 % Wilson interval of the success rate"""

    @property
    def rate(self) -> float:
        return self.successes / self.graded if self.graded else 0.0


def table(trajectories: Sequence[Trajectory]) -> list[Row]:
    """A row for all tasks, then one a level and view."""
    parts: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        parts[_part(trajectory.task)].append(trajectory)
    return [_row("all", trajectories), *(_row(name, parts[name]) for name in sorted(parts))]


def paired(
    new: Sequence[Trajectory], old: Sequence[Trajectory], *, seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference in success on the tasks that both were graded on, with a 95 % bootstrap interval."""
    before = {t.task.key: o for t in old if (o := outcome(t.verdict)) is not None}
    pairs = [
        (o, before[t.task.key]) for t in new if (o := outcome(t.verdict)) is not None and t.task.key in before
    ]
    return paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs], seed=seed)


def component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each component over the runs in which it was scored, and of the composed reward."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.verdict is None:
            continue
        scored = {"reward": trajectory.verdict.reward, **trajectory.verdict.components}
        for name, value in scored.items():
            if value is not None:
                values[name].append(value)
    return {name: sum(of) / len(of) for name, of in values.items()}


def _part(task: Task) -> str:
    return f"level {task.level} {task.view}" if task.level is not None else "other"


def _row(name: str, trajectories: Sequence[Trajectory]) -> Row:
    outcomes = [o for t in trajectories if (o := outcome(t.verdict)) is not None]
    successes = sum(o >= 1 for o in outcomes)
    low, high = wilson(successes, len(outcomes))
    return Row(
        name=name,
        successes=successes,
        graded=len(outcomes),
        ungraded=len(trajectories) - len(outcomes),
        low=low,
        high=high,
    )
