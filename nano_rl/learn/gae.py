"""Generalised advantage estimation (GAE) over the sampled tokens of a rollout.

Schulman et al. 2016 (arXiv 1506.02438). A rollout is one chain of decisions over all of its turns and token
rows, in the order in which they were sampled: the turns of a sub-agent follow the turn that delegated to it
and precede its parent's next. The last sampled token of a turn is followed by the first sampled token of the
next turn, and context tokens between them are not states. The value after the last token is 0, also for a
rollout that hit a limit, since the limit is part of the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.learn.rows.sample import TrainSample, to_samples
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The rows of one rollout with the reward of each token."""

    rows: tuple[TrainSample, ...]
    """in the order of their `turn_ids_T`, or as given where they have none"""
    rewards: tuple[tuple[float, ...], ...]
    """[rows][L] the turn's reward on the last sampled token of each turn, 0 elsewhere"""

    @property
    def places(self) -> list[tuple[int, int]]:
        """Row and position of each sampled token, as they were sampled: a turn lies in one row."""
        return _places(self.rows)


def reward_chain(trajectory: Trajectory, turn_rewards: Sequence[float]) -> Chain:
    """Put the reward of each turn ([T]) on the last token sampled in that turn, or before it if it has none.

    Turns before the first token that is trained, such as those of a fork's parent, give no reward.

    Raises ValueError as `to_samples`, and where the numbers of turns and rewards differ.
    """
    if len(turn_rewards) != len(trajectory.turns):
        raise ValueError(
            f"run {trajectory.id!r} has {len(trajectory.turns)} turns and {len(turn_rewards)} turn rewards"
        )
    rows = to_samples(trajectory, 0.0)
    rewards = [[0.0] * len(row.ids) for row in rows]
    last_of_turn = {rows[r].turn_ids_T[t]: (r, t) for r, t in _places(rows)}
    place = None
    for turn, reward in enumerate(turn_rewards):
        place = last_of_turn.get(turn, place)
        if place is not None:
            rewards[place[0]][place[1]] += reward
    return Chain(rows=tuple(rows), rewards=tuple(map(tuple, rewards)))


def _places(rows: Sequence[TrainSample]) -> list[tuple[int, int]]:
    sampled = ((r, t) for r, row in enumerate(rows) for t, m in enumerate(row.mask) if m)

    def when(place: tuple[int, int]) -> tuple[int, int, int]:
        r, t = place
        return rows[r].turn_ids_T[t] if rows[r].turn_ids_T else 0, r, t

    return sorted(sampled, key=when)


def gae(
    rewards: Sequence[float], values: Sequence[float], *, discount: float, lam: float
) -> tuple[list[float], list[float]]:
    """[N] advantages and [N] returns (advantage + value) of a chain of N sampled tokens.

    d_k = r_k + discount * V_(k+1) - V_k with V_N = 0, and A_k = d_k + discount * lam * A_(k+1). `lam` = 1
    gives return minus value, `lam` = 0 the one-step temporal difference.
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
    """[rows][L] advantages and returns; 0 on tokens that were not sampled.

    `values` is [rows][L]: the value of the state before each token; only sampled tokens are read.
    """
    places = chain.places
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
    """[rows][L] advantages with mean 0 and standard deviation 1 over the sampled tokens of all rows.

    0 on tokens that were not sampled, and everywhere if all advantages are equal.
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
