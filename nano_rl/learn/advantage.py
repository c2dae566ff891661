"""Advantages: the rewards of a group minus a baseline, for whole rollouts or for each of their turns.

The default subtracts the group mean alone, as in Dr. GRPO (Liu et al. 2025, arXiv 2503.20783); `rloo` is the
leave-one-out baseline of Kool et al. 2019 and Ahmadian et al. 2024 (arXiv 2402.14740); `std` adds the
division of GRPO (Shao et al. 2024, arXiv 2402.03300). The parts of a reward can be normalised separately
and then summed, and turns can be credited with their discounted returns. `RunningBaselines` compares with
earlier steps. Advantages of a critic are in `gae.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nano_rl.learn.config import Baseline, ObjectiveConfig, Std
from nano_rl.learn.rows.group import Group, is_dead
from nano_shared.types import StopReason, Trajectory


def group_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "mean", std: Std = "none", eps: float = 1e-4
) -> list[float]:
    """[G] one advantage for each rollout of a group, in the order of `rewards`; never NaN.

    A reward of None or NaN is left out of the baseline and gets 0.0. With a baseline, a group whose rewards
    are exactly equal and a group with a single scored rollout get exactly 0.0. `baseline="none"` is plain
    REINFORCE: the advantage is the reward itself. `std` divides by the deviation of the whole group plus
    `eps`; a leave-one-out deviation is not used, because it is 0 where one rollout differs from equal peers.

    Raises ValueError for an infinite reward, and for `std` without a baseline.
    """
    if baseline == "none" and std != "none":
        raise ValueError(f"std={std!r} needs a baseline; choose baseline='mean' or std='none'")
    if any(r is not None and math.isinf(r) for r in rewards):
        raise ValueError(f"rewards must be finite or None, not {list(rewards)}")
    scored = [float(r) for r in rewards if r is not None and not math.isnan(r)]
    if baseline != "none" and is_dead(rewards):
        return [0.0] * len(rewards)
    scale = _deviation(scored, std) + eps if std != "none" else 1.0
    return [
        0.0 if r is None or math.isnan(r) else (r - _baseline(r, scored, baseline)) / scale for r in rewards
    ]


def summed_advantages(
    objectives: Sequence[tuple[float, Sequence[float | None]]],
    *,
    baseline: Baseline,
    std: Std,
    eps: float = 1e-4,
) -> list[float]:
    """[G] the weighted sum of the advantages of each objective; an objective is (weight, [G] rewards).

    Normalised separately, rollouts that are good in different parts differ even where their summed rewards
    agree: GDPO (Liu et al. 2026, arXiv 2601.05242), without its normalisation of the sums over the batch.

    Raises ValueError where the objectives have different numbers of rollouts, and as `group_advantages`.
    """
    if len({len(rewards) for _, rewards in objectives}) > 1:
        raise ValueError(f"objectives of {[len(r) for _, r in objectives]} rollouts cannot be summed")
    apart = [
        [weight * a for a in group_advantages(rewards, baseline=baseline, std=std, eps=eps)]
        for weight, rewards in objectives
    ]
    return [math.fsum(of_rollout) for of_rollout in zip(*apart, strict=True)]


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """[T] the discounted return of each turn: R_t = r_t + discount * R_(t+1)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(
    rewards: Sequence[Sequence[float] | None], *, discount: float, baseline: Baseline = "mean"
) -> list[list[float]]:
    """[G][T] the discounted return of each turn minus the baseline; `rewards` are [G][T].

    The baseline is the mean over rollouts (`rloo`: over the other rollouts) of the mean return of their
    turns, so that each rollout counts once. With discount 1 and all reward in the last turn this equals
    `group_advantages`. A rollout whose rewards are None is left out of the baseline and gets no advantages; a
    group with fewer than two scored rollouts gets 0.0 throughout.

    Raises ValueError for a reward that is not finite.
    """
    if any(not math.isfinite(r) for of_rollout in rewards for r in of_rollout or ()):
        raise ValueError(f"turn rewards must be finite, not {rewards}")
    returns = [None if r is None else discounted_returns(r, discount) for r in rewards]
    means = [math.fsum(r) / len(r) if r else None for r in returns]
    scored = [m for m in means if m is not None]
    if baseline != "none" and len(scored) < 2:
        return [[0.0] * len(r or ()) for r in returns]
    return [
        [value - _baseline(mean, scored, baseline) for value in of_rollout or ()] if mean is not None else []
        for of_rollout, mean in zip(returns, means, strict=True)
    ]


def _baseline(reward: float, scored: list[float], baseline: Baseline) -> float:
    if baseline == "none":
        return 0.0
    if baseline == "mean":
        return math.fsum(scored) / len(scored)
    return math.fsum((*scored, -reward)) / (len(scored) - 1)


def _deviation(scored: list[float], std: Std) -> float:
    mean = math.fsum(scored) / len(scored)
    freedom = len(scored) - 1 if std == "sample" else len(scored)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / freedom)


class RewardParts(Protocol):
    """The parts of a composed reward."""

    def objectives(self, runs: Sequence[Trajectory]) -> Sequence[tuple[float, Sequence[float | None]]]:
        """(weight, [G] scores) of each part, for parts that are normalised separately."""


def cut_off(trajectory: Trajectory) -> bool:
    """True if a token budget ended the rollout: by its stop reason, or by the finish of its last call."""
    if trajectory.stop in (StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL):
        return True
    return bool(trajectory.turns) and trajectory.turns[-1].completion.finish.is_cut


def length_penalty(trajectory: Trajectory, *, limit: int, buffer: int) -> float:
    """0 up to `limit - buffer` sampled tokens, falling linearly to -1 at `limit`; added to the reward.

    The soft overlong punishment of DAPO (arXiv 2503.14476).
    """
    sampled = sum(len(t.completion.tokens.sampled_ids) for t in trajectory.turns if t.completion.tokens)
    return -min(max(sampled - (limit - buffer), 0) / buffer, 1.0)


Credit = Sequence[float | Sequence[float] | None]
"""[G] of each rollout one advantage, or one for each of its turns; None leaves the rollout out of the loss"""


def group_credit(group: Group, objective: ObjectiveConfig, reward: RewardParts | None) -> Credit:
    """[G] the advantages of a group under an objective. `reward` gives the parts for `normalise` = each.

    None for a rollout without a reward, and under `overlong` = mask for one that was cut off.
    """
    rewards_G = group_rewards(group, objective)
    credit = _advantages(group, rewards_G, objective, reward)
    return [None if math.isnan(r) else a for r, a in zip(rewards_G, credit, strict=True)]


def _advantages(
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
            (weight, [None if out else v for v, out in zip(scores, out_G, strict=True)])
            for weight, scores in parts
        ]
        return summed_advantages(compared, **settings)
    return group_advantages(rewards_G, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditedGroup:
    """A group with its credit, which is computed once a step, when the group has been gathered."""

    group: Group
    credit: Credit | None
    """None where the advantages come from a critic or from `RunningBaselines`"""
    has_signal: bool
    """True if the group has a non-zero advantage. With `dead_groups` = keep, a critic, or a baseline over
    time: True if any of its rollouts is scored."""


def credit_group(group: Group, objective: ObjectiveConfig, reward: RewardParts | None) -> CreditedGroup:
    """The credit of one group under an objective, and whether the group has a signal."""
    by_group = objective.objective != "ppo" and not objective.over_time
    credit = group_credit(group, objective, reward) if by_group else None
    if credit is None or objective.dead_groups == "keep":
        signal = not all(math.isnan(r) for r in group_rewards(group, objective))
    else:
        signal = any(
            a != 0 for of in credit if of is not None for a in ([of] if isinstance(of, float) else of)
        )
    return CreditedGroup(group=group, credit=credit, has_signal=signal)


def turn_rewards(group: Group, objective: ObjectiveConfig) -> list[Sequence[float] | None]:
    """[G][T] the reward of each turn, the length penalty added to the last; None for a rollout without a
    reward."""
    rewards_G, penalties = group_rewards(group, objective), _penalties(group, objective)
    return [
        _turn_rewards(run, reward, penalty)
        for run, reward, penalty in zip(group.trajectories, rewards_G, penalties, strict=True)
    ]


def group_rewards(group: Group, objective: ObjectiveConfig) -> list[float]:
    """[G] rewards with the length penalty added; NaN for a rollout that is left out of the comparison."""
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
    """[T] turn rewards of the verdict, or else the whole reward in the last turn; None if not scored."""
    if math.isnan(reward):
        return None
    given = run.verdict.turn_rewards if run.verdict else None
    if given is None:
        return [0.0] * (len(run.turns) - 1) + [reward]
    return [*given[:-1], given[-1] + penalty]


KEEP = 31 / 32
"""factor by which each new run reduces the weight of earlier runs: the last 32 or so count"""
PRIOR = 1.0
"""weight, in runs, of the mean over all tasks in the baseline of one task"""
_ALL = "all"


class RunningBaselines:
    """Baselines over time, for steps whose groups are small: running means of the rewards of tasks and
    levels.

        task   b_i = (past of the task + rewards of the others in the group + PRIOR * p_i) / (their weights)
        level  b_i = (past of the level + rewards of the others of that level in the step) / (their weights)

    p_i is the mean over all tasks, past and present, without run i. The past is a running sum in which each
    later run of the task (level) weighs 1 / KEEP times the one before. No baseline contains the reward that
    it is compared with, so the policy gradient stays unbiased; rewards of older policies make the baseline
    lag, which adds variance. A run that is learned from twice (`uses`) finds its own reward in the past,
    which biases its gradient toward 0 by its weight in the baseline.
    """

    def __init__(self) -> None:
        self._past: dict[str, tuple[float, float]] = {}
        """name -> sum of rewards, weight"""

    def credit(self, groups: Sequence[Group], objective: ObjectiveConfig) -> list[Credit]:
        """[groups][G] each reward minus the running baseline of its task or level."""
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
        """Add the rewards of a step; does nothing unless the objective uses a running baseline."""
        if not objective.over_time:
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
        """Sum and weight of past and present step together, without one reward of the present step."""
        past, now = self._past.get(name, (0.0, 0.0)), step[name]
        return past[0] + now[0] - reward, past[1] + now[1] - 1

    @staticmethod
    def _sums(
        groups: Sequence[Group], rewards_of: Sequence[Sequence[float]]
    ) -> dict[str, tuple[float, float]]:
        """Sum and count of the rewards of a step: per task, per level, and over all."""
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
    """sum / weight, or `otherwise` where nothing was recorded, which makes the advantage 0."""
    return of[0] / of[1] if of[1] > 1e-9 else otherwise
