"""Baselines over time: what a reward is compared with where the groups of a step are small.

    task   b_i = (past of the task + rewards of the others in the group + PRIOR * p_i) / (their weights)
    level  b_i = (past of the level + rewards of the others of that level in the step) / (their weights)

p_i is the mean over all tasks, past and present, without i. The past is a moving sum in which each later run
of the task (level) weighs KEEP times more than the one before. No baseline holds the reward that it is
compared with, so the policy gradient keeps its expectation; what an older policy earned makes the baseline
late, which costs variance and, where all rewards have risen since, pushes up all that is sampled until the
past has caught up. A run that is learned from twice (`uses`) meets its own reward in the past: there alone
the gradient is biased, toward 0, by its weight in the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nano_rl.learn.config.objective import ObjectiveConfig
from nano_rl.learn.credit.turns import Credit, RewardParts, group_credit, group_rewards
from nano_rl.learn.rows.group import Group

KEEP = 31 / 32
"""what each later run leaves of the weight of the runs before it: about 32 runs count"""
PRIOR = 1.0
"""runs that the mean over all tasks counts for in the baseline of one"""
_ALL = "all"
Moving = Literal["task", "level"]


class Baselines:
    """Moving means of what tasks and levels earned, and the credit against them."""

    def __init__(self) -> None:
        self._past: dict[str, tuple[float, float]] = {}
        """name -> sum of rewards, weight"""

    def credit(
        self, groups: Sequence[Group], objective: ObjectiveConfig, reward: RewardParts | None
    ) -> list[Credit]:
        """[groups][G] the advantages of a step; against a baseline within the group where that is asked."""
        if objective.baseline not in ("task", "level"):
            return [group_credit(group, objective, reward) for group in groups]
        rewards_of = [group_rewards(group, objective) for group in groups]
        step = self._sums(groups, rewards_of)
        return [
            [
                None if math.isnan(r) else r - self._baseline(group, rewards_G, r, step, objective.baseline)
                for r in rewards_G
            ]
            for group, rewards_G in zip(groups, rewards_of, strict=True)
        ]

    def record(self, groups: Sequence[Group], objective: ObjectiveConfig) -> None:
        """Remember what a step earned; only where the objective compares with it."""
        if objective.baseline not in ("task", "level"):
            return
        for name, (total, count) in self._sums(groups, [group_rewards(g, objective) for g in groups]).items():
            past, weight = self._past.get(name, (0.0, 0.0))
            kept = KEEP**count
            self._past[name] = (past * kept + total, weight * kept + count)

    def state(self) -> dict[str, Any]:
        return {name: list(of) for name, of in self._past.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._past = {str(name): (float(of[0]), float(of[1])) for name, of in state.items()}

    def _baseline(
        self,
        group: Group,
        rewards_G: Sequence[float],
        reward: float,
        step: Mapping[str, tuple[float, float]],
        kind: str,
    ) -> float:
        if kind == "level":
            return _mean(self._with(_level(group), step, reward), reward)
        total, weight = self._past.get(_task(group), (0.0, 0.0))
        others = [r for r in rewards_G if not math.isnan(r)]
        total, weight = total + math.fsum(others) - reward, weight + len(others) - 1
        every = self._with(_ALL, step, reward)
        if every[1] > 0:
            total, weight = total + PRIOR * every[0] / every[1], weight + PRIOR
        return _mean((total, weight), reward)

    def _with(self, name: str, step: Mapping[str, tuple[float, float]], reward: float) -> tuple[float, float]:
        """Sum and weight of the past and of the step, without one reward of the step."""
        past, now = self._past.get(name, (0.0, 0.0)), step[name]
        return past[0] + now[0] - reward, past[1] + now[1] - 1

    @staticmethod
    def _sums(
        groups: Sequence[Group], rewards_of: Sequence[Sequence[float]]
    ) -> dict[str, tuple[float, float]]:
        """Sum and number of the rewards of a step, by task, by level and over all."""
        sums: dict[str, tuple[float, float]] = {}
        for group, rewards_G in zip(groups, rewards_of, strict=True):
            scored = [r for r in rewards_G if not math.isnan(r)]
            for name in (_task(group), _level(group), _ALL) if scored else ():
                total, count = sums.get(name, (0.0, 0.0))
                sums[name] = (total + math.fsum(scored), count + len(scored))
        return sums


def _task(group: Group) -> str:
    return f"task {group.task_key}"


def _level(group: Group) -> str:
    return f"level {group.trajectories[0].task.level}"


def _mean(of: tuple[float, float], otherwise: float) -> float:
    """Nothing to compare with leaves an advantage of 0."""
    return of[0] / of[1] if of[1] > 1e-9 else otherwise
