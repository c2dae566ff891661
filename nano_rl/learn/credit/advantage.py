"""Rewards of one group to advantages: a baseline, and a standard deviation only on request.

Mean-only by default, as in Dr. GRPO (Liu et al. 2025, arXiv 2503.20783); `rloo` is the leave-one-out
baseline of Kool et al. 2019 and Ahmadian et al. 2024 (arXiv 2402.14740); `std` adds the division of GRPO
(Shao et al. 2024, arXiv 2402.03300). Several objectives can be compared apart and then summed, and turns
can be credited with their discounted returns. Left out: group-free baselines and any learned critic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nano_rl.learn.config.objective import Baseline, Std
from nano_rl.learn.rows.group import is_dead


def group_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "mean", std: Std = "none", eps: float = 1e-4
) -> list[float]:
    """[G] one advantage for each rollout of a group, in the order of `rewards`; never NaN.

    A reward of None (or NaN) leaves the baseline and gets 0.0. Against a baseline, a group without variation,
    decided by exact equality of its rewards, and a group with a single scored rollout get exactly 0.0.
    `baseline="none"` is plain REINFORCE: the advantage is the reward itself, whatever the group.
    `std` divides by the deviation of the whole group plus `eps`; a leave-one-out deviation is never used,
    because it vanishes where one rollout differs from equal peers.

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
    """[G] the weighted sum of each objective's own advantages; an objective is (weight, [G] rewards).

    So that "right but untidy" and "wrong but tidy" differ even where their sums agree, as in GDPO (Liu et al.
    2026, arXiv 2601.05242). Left out of it: the normalisation of the sums over the batch.

    Raises ValueError where the objectives speak of different numbers of rollouts, and as `group_advantages`.
    """
    if len({len(rewards) for _, rewards in objectives}) > 1:
        raise ValueError(f"objectives of {[len(r) for _, r in objectives]} rollouts cannot be summed")
    apart = [
        [weight * a for a in group_advantages(rewards, baseline=baseline, std=std, eps=eps)]
        for weight, rewards in objectives
    ]
    return [math.fsum(of_rollout) for of_rollout in zip(*apart, strict=True)]


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """[T] what each turn and all after it earned: R_t = r_t + discount * R_(t+1)."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return returns[::-1]


def turn_advantages(
    rewards: Sequence[Sequence[float] | None], *, discount: float, baseline: Baseline = "mean"
) -> list[list[float]]:
    """[G][T] each turn's discounted return against the group's; `rewards` are per rollout and turn.

    The baseline is the mean over rollouts (`rloo`: over the others) of the mean return of their turns, so a
    rollout counts once however many turns it took. With discount 1 and all reward in the last turn this is
    `group_advantages`. None leaves the baseline and has no turns; a group with fewer than two scored rollouts
    gets 0.0 throughout.

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
