"""Evaluation: success on held-out tasks with confidence intervals, by level, paired against a baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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
    before = {t.task.key: t.reward for t in old if t.reward is not None}
    pairs = [(t.reward, before[t.task.key]) for t in new if t.reward is not None and t.task.key in before]
    return paired_bootstrap([a for a, _ in pairs], [b for _, b in pairs], seed=seed)


def _part(task: Task) -> str:
    return f"level {task.level} {task.view}" if task.level is not None else "other"


def _row(name: str, trajectories: Sequence[Trajectory]) -> Row:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    successes = sum(reward >= 1 for reward in rewards)
    low, high = wilson(successes, len(rewards))
    return Row(
        name=name,
        successes=successes,
        graded=len(rewards),
        ungraded=len(trajectories) - len(rewards),
        low=low,
        high=high,
    )
