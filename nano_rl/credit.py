"""Credit: the advantages of a group under an objective, for whole rollouts or for each of their turns."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nano_rl.advantage import group_advantages, summed_advantages, turn_advantages
from nano_rl.config import ObjectiveConfig
from nano_rl.group import Group
from nano_rl.rewards import Reward
from nano_shared.types import Trajectory

Credit = Sequence[float | Sequence[float]]
"""[G] one advantage a rollout, or one for each of its turns"""


def group_credit(group: Group, objective: ObjectiveConfig, reward: Reward | None) -> Credit:
    """[G] advantages as the objective wants them. `reward` names the parts that are normalised apart."""
    if objective.discount is not None:
        turns_G = [turn_rewards(t, r) for t, r in zip(group.trajectories, group.rewards_G, strict=True)]
        return turn_advantages(turns_G, discount=objective.discount, baseline=objective.baseline)
    settings = {"baseline": objective.baseline, "std": objective.std, "eps": objective.std_eps}
    if objective.normalise == "each" and reward is not None:
        return summed_advantages(reward.objectives(group.trajectories), **settings)  # type: ignore[arg-type]
    return group_advantages(group.rewards_G, **settings)  # type: ignore[arg-type]


def has_signal(group: Group, objective: ObjectiveConfig, reward: Reward | None) -> bool:
    """Whether any rollout, or turn, is credited differently from another."""
    if objective.discount is None and objective.normalise == "sum":
        return not group.dead
    credit = group_credit(group, objective, reward)
    return any(a != 0 for of in credit for a in ([of] if isinstance(of, float) else of))


def turn_rewards(run: Trajectory, reward: float) -> Sequence[float] | None:
    """[T] as the verdict gives them, or the whole reward in the last turn."""
    if math.isnan(reward):
        return None
    given = run.verdict.turn_rewards if run.verdict else None
    return given if given is not None else [0.0] * (len(run.turns) - 1) + [reward]
