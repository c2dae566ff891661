"""Credit: the advantages of a group under an objective, for whole rollouts or for each of their turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from nano_rl.learn.config.objective import ObjectiveConfig
from nano_rl.learn.credit.advantage import group_advantages, summed_advantages, turn_advantages
from nano_rl.learn.rows.group import Group
from nano_shared import Finish, StopReason, Trajectory


class RewardParts(Protocol):
    """A composed reward, as far as credit reads it."""

    def objectives(self, runs: Sequence[Trajectory]) -> Sequence[tuple[float, Sequence[float | None]]]:
        """(weight, [G] what counts of one part) of each part, for parts that are normalised apart."""


def cut_off(trajectory: Trajectory) -> bool:
    """Whether a token budget ended the rollout, by its stop reason or by the finish of its last call."""
    if trajectory.stop in (StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL):
        return True
    return bool(trajectory.turns) and trajectory.turns[-1].completion.finish == Finish.LENGTH


def length_penalty(trajectory: Trajectory, *, limit: int, buffer: int) -> float:
    """From 0 to -1, by the sampled tokens of the rollout; added to its reward."""
    sampled = sum(len(t.completion.tokens.sampled_ids) for t in trajectory.turns if t.completion.tokens)
    return -min(max(sampled - (limit - buffer), 0) / buffer, 1.0)


Credit = Sequence[float | Sequence[float] | None]
"""[G] one advantage a rollout, or one for each of its turns; None leaves the loss as it left the baseline"""


def group_credit(group: Group, objective: ObjectiveConfig, reward: RewardParts | None) -> Credit:
    """[G] advantages as the objective wants them. `reward` names the parts that are normalised apart.

    A rollout without a reward has None, and under `overlong` = mask one that was cut off.
    """
    rewards_G = group_rewards(group, objective)
    credit = _compared(group, rewards_G, objective, reward)
    return [None if math.isnan(r) else a for r, a in zip(rewards_G, credit, strict=True)]


def _compared(
    group: Group, rewards_G: Sequence[float], objective: ObjectiveConfig, reward: RewardParts | None
) -> Credit:
    runs, out_G = group.trajectories, [math.isnan(r) for r in rewards_G]
    settings: dict[str, Any] = {
        "baseline": objective.within_group, "std": objective.std, "eps": objective.std_eps
    }  # fmt: skip
    if objective.discount is not None:
        turns_G = turn_rewards(group, objective)
        return turn_advantages(turns_G, discount=objective.discount, baseline=objective.within_group)
    if objective.normalise == "each" and reward is not None:
        parts: list[tuple[float, Sequence[float | None]]] = [*reward.objectives(runs)]
        parts.append((1.0, _penalties(group, objective)))
        compared = [
            (weight, [None if gone else v for v, gone in zip(of, out_G, strict=True)]) for weight, of in parts
        ]
        return summed_advantages(compared, **settings)
    return group_advantages(rewards_G, **settings)


def has_signal(group: Group, objective: ObjectiveConfig, reward: RewardParts | None) -> bool:
    """Whether the group belongs into the step: any rollout, or turn, is credited differently from another.

    Under `dead_groups` = keep, with a critic and with a baseline over time, whose advantages are not the
    group's, any scored rollout.
    """
    if objective.dead_groups == "keep" or objective.objective == "ppo" or objective.over_time:
        return not all(math.isnan(r) for r in group_rewards(group, objective))
    return credits_differ(group_credit(group, objective, reward))


def credits_differ(credit: Credit) -> bool:
    """Whether any rollout, or turn, has an advantage."""
    return any(a != 0 for of in credit if of is not None for a in ([of] if isinstance(of, float) else of))


def turn_rewards(group: Group, objective: ObjectiveConfig) -> list[Sequence[float] | None]:
    """[G][T] what each turn earned, the punishment of length on the last; None for a rollout that leaves."""
    rewards_G, penalties = group_rewards(group, objective), _penalties(group, objective)
    return [
        _turn_rewards(run, reward, penalty)
        for run, reward, penalty in zip(group.trajectories, rewards_G, penalties, strict=True)
    ]


def group_rewards(group: Group, objective: ObjectiveConfig) -> list[float]:
    """[G] what is compared: NaN for what leaves the group; less the punishment of length."""
    return [
        math.nan if objective.overlong == "mask" and cut_off(run) else reward + penalty
        for run, reward, penalty in zip(
            group.trajectories, group.rewards_G, _penalties(group, objective), strict=True
        )
    ]


def _penalties(group: Group, objective: ObjectiveConfig) -> list[float]:
    limit, buffer = objective.overlong_limit, objective.overlong_buffer
    if objective.overlong != "shape" or limit is None or buffer is None:
        return [0.0] * len(group.trajectories)
    return [length_penalty(run, limit=limit, buffer=buffer) for run in group.trajectories]


def _turn_rewards(run: Trajectory, reward: float, penalty: float) -> Sequence[float] | None:
    """[T] as the verdict gives them, or the whole reward in the last turn, which the penalty falls on."""
    if math.isnan(reward):
        return None
    given = run.verdict.turn_rewards if run.verdict else None
    if given is None:
        return [0.0] * (len(run.turns) - 1) + [reward]
    return [*given[:-1], given[-1] + penalty]
