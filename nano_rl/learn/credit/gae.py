"""Generalised advantage estimation over the tokens that the policy sampled, and over nothing else.

Schulman et al. 2016 (arXiv 1506.02438). A rollout is one chain of decisions, however many turns and token
rows it has: after a turn's last sampled token comes the next turn's first one, and what stands between them
(observations, template text) is no state of its own. The chain ends with the rollout, whose last value
is followed by 0: a rollout that hit a limit is an ending too, since the limit is part of the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.learn.rows.sample import TrainSample, to_samples
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The rows of one rollout in order, with the reward that each token earned."""

    rows: tuple[TrainSample, ...]
    rewards: tuple[tuple[float, ...], ...]
    """[rows][L] on the last sampled token of a turn what the turn earned, elsewhere 0"""


def reward_chain(trajectory: Trajectory, turn_rewards: Sequence[float]) -> Chain:
    """A rollout with each turn's reward ([T]) on the last token that was sampled in it.

    Raises ValueError as `to_samples`, and where the turns and their rewards differ in number.
    """
    if len(turn_rewards) != len(trajectory.turns):
        raise ValueError(
            f"run {trajectory.id!r} has {len(trajectory.turns)} turns and {len(turn_rewards)} turn rewards"
        )
    rows = to_samples(trajectory, 0.0)
    return Chain(rows=tuple(rows), rewards=tuple(_placed(row, turn_rewards) for row in rows))


def _placed(row: TrainSample, turn_rewards: Sequence[float]) -> tuple[float, ...]:
    rewards = [0.0] * len(row.ids)
    last = {turn: t for t, turn in enumerate(row.turn_ids_T) if row.mask[t]}
    for turn, position in last.items():
        rewards[position] = turn_rewards[turn]
    return tuple(rewards)


def gae(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, lam: float
) -> tuple[list[float], list[float]]:
    """[N] advantages and [N] returns (advantage + value) of a chain of N sampled tokens.

    d_k = r_k + discount * V_(k+1) - V_k with V_N = 0, and A_k = d_k + discount * lam * A_(k+1). `lam` 1 gives
    the return less the value, `lam` 0 the one-step difference.
    """
    advantages = [0.0] * len(rewards)
    following = next_value = 0.0
    for k in range(len(rewards) - 1, -1, -1):
        following = rewards[k] + discount * next_value - values[k] + discount * lam * following
        next_value = values[k]
        advantages[k] = following
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def chain_gae(
    chain: Chain, values: Sequence[Sequence[float]], *, discount: float, lam: float
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """[rows][L] advantages and returns, 0 on tokens that were not sampled.

    `values` are [rows][L], each the value of the state before its token; only those of sampled tokens count.
    """
    places = [(r, t) for r, row in enumerate(chain.rows) for t, m in enumerate(row.mask) if m]
    advantages_N, returns_N = gae(
        [chain.rewards[r][t] for r, t in places],
        [values[r][t] for r, t in places],
        discount=discount,
        lam=lam,
    )
    return _spread(chain, places, advantages_N), _spread(chain, places, returns_N)


def whitened(
    advantages: Sequence[Sequence[float]], masks: Sequence[Sequence[int]]
) -> list[tuple[float, ...]]:
    """[rows][L] advantages with mean 0 and deviation 1 over the sampled tokens of all rows; 0 elsewhere.

    Advantages that are all equal become 0: there is nothing to prefer among them.
    """
    flat = [
        a for row, mask in zip(advantages, masks, strict=True) for a, m in zip(row, mask, strict=True) if m
    ]
    mean = math.fsum(flat) / max(len(flat), 1)
    deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in flat) / max(len(flat), 1))
    scale = 0.0 if not flat or min(flat) == max(flat) else 1 / (deviation + 1e-8)
    return [
        tuple((a - mean) * scale * m for a, m in zip(row, mask, strict=True))
        for row, mask in zip(advantages, masks, strict=True)
    ]


def _spread(
    chain: Chain, places: Sequence[tuple[int, int]], numbers: Sequence[float]
) -> list[tuple[float, ...]]:
    rows = [[0.0] * len(row.ids) for row in chain.rows]
    for (r, t), number in zip(places, numbers, strict=True):
        rows[r][t] = number
    return [tuple(row) for row in rows]
