"""GAE runs along the tokens that were sampled, whatever stands between them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from builders import trajectory, turn
from hypothesis import given
from hypothesis import strategies as st

from nano_preferences.critic import Chain, chain_gae, reward_chain
from nano_rl.learn.advantages import gae, whitened
from nano_shared.types import Trajectory

numbers = st.floats(-3, 3, allow_nan=False)


def by_definition(
    rewards: Sequence[float], values: Sequence[float], discount: float, lam: float
) -> list[float]:
    """A_k = sum over l of (discount * lam)^l * d_(k+l), term by term."""
    size = len(rewards)
    following = [*values[1:], 0.0]
    d = [rewards[k] + discount * following[k] - values[k] for k in range(size)]
    return [sum((discount * lam) ** (j - k) * d[j] for j in range(k, size)) for k in range(size)]


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_equals_the_sum_that_defines_it(
    pairs: list[tuple[float, float]], discount: float, lam: float
) -> None:
    rewards, values = [r for r, _ in pairs], [v for _, v in pairs]
    advantages, returns = gae(rewards, values, discount=discount, lam=lam)
    assert advantages == pytest.approx(by_definition(rewards, values, discount, lam), abs=1e-9)
    assert returns == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)])


def test_lambda_one_is_the_return_less_the_value_and_lambda_zero_one_step() -> None:
    rewards, values = [0.0, 1.0, 2.0], [0.5, -0.5, 1.0]
    assert gae(rewards, values, discount=0.5, lam=1)[0] == pytest.approx([1.0 - 0.5, 2.0 + 0.5, 2.0 - 1.0])
    assert gae(rewards, values, discount=0.5, lam=0)[0] == pytest.approx([-0.25 - 0.5, 1.5 + 0.5, 2.0 - 1.0])
    assert gae(rewards, values, discount=0.5, lam=1)[1] == pytest.approx([1.0, 2.0, 2.0])


def test_a_hand_computed_chain() -> None:
    # d = (0 + .9*.4 - .2, 0 + .9*.6 - .4, 1 - .6) = (.16, .14, .4); A_2 = .4, A_1 = .14 + .72*.4, A_0 = ...
    advantages, _ = gae([0.0, 0.0, 1.0], [0.2, 0.4, 0.6], discount=0.9, lam=0.8)
    assert advantages == pytest.approx([0.16 + 0.72 * (0.14 + 0.72 * 0.4), 0.14 + 0.72 * 0.4, 0.4])


def two_turns(context: int, *, row: int = 0) -> Trajectory:
    return trajectory(turn(2, 2, index=0), turn(context, 3, index=1, row=row), reward=1.0)


def sampled(chain: Chain, rows: Sequence[Sequence[float]]) -> list[float]:
    """The numbers of the sampled tokens, turn after turn: the order in time, found by looking for each
    turn."""
    each = [
        (turn, x)
        for row, own in zip(chain.rows, rows, strict=True)
        for turn, x, m in zip(row.turn_ids_T, own, row.mask, strict=True)
        if m
    ]
    return [x for index in range(max(turn for turn, _ in each) + 1) for turn, x in each if turn == index]


def laid(chain: Chain, values: Sequence[float], *, elsewhere: float) -> list[list[float]]:
    """Values on sampled tokens in the order in time, and a number on all others that must not matter."""
    rows = [[elsewhere] * len(row.ids) for row in chain.rows]
    left = iter(values)
    for index in range(max(max(row.turn_ids_T) for row in chain.rows) + 1):
        for row, sample in zip(rows, chain.rows, strict=True):
            for t, (of_turn, m) in enumerate(zip(sample.turn_ids_T, sample.mask, strict=True)):
                if m and of_turn == index:
                    row[t] = next(left)
    return rows


@pytest.mark.parametrize(("context", "row"), [(1, 0), (5, 0), (17, 0), (4, 1)])
def test_multi_turn_gae_ignores_observation_positions(context: int, row: int) -> None:
    """The value after a turn's last token is that of the next turn's first, across observations and rows."""
    values = [0.3, -0.2, 0.7, 0.1, 0.4]
    expected = by_definition([0, 0.25, 0, 0, 0.75], values, 0.9, 0.8)
    chain = reward_chain(two_turns(context, row=row), [0.25, 0.75])
    assert len(chain.rows) == row + 1
    for elsewhere in (0.0, 99.0):
        advantages, returns = chain_gae(
            chain, laid(chain, values, elsewhere=elsewhere), discount=0.9, lam=0.8
        )
        assert sampled(chain, advantages) == pytest.approx(expected)
        assert sampled(chain, returns) == pytest.approx(
            [a + v for a, v in zip(expected, values, strict=True)]
        )
        outside = [
            x
            for own, r in zip(advantages, chain.rows, strict=True)
            for x, m in zip(own, r.mask, strict=True)
            if not m
        ]
        assert set(outside) == {0.0}


def test_a_turn_is_rewarded_on_its_last_sampled_token() -> None:
    chain = reward_chain(two_turns(3), [0.25, 0.75])
    (row,) = chain.rows
    assert row.mask == (0, 0, 1, 1, 0, 0, 0, 1, 1, 1)
    assert chain.rewards == ((0, 0, 0, 0.25, 0, 0, 0, 0, 0, 0.75),)
    with pytest.raises(ValueError, match="2 turns and 1 turn rewards"):
        reward_chain(two_turns(3), [1.0])


def rollout(*turns: tuple[int, int | None], inherited: int = 0, sizes: Sequence[int] = ()) -> Trajectory:
    """A rollout of turns, each given by its token row and the turn that delegated it."""
    made = [
        turn(2, size, index=index, row=row).model_copy(update={"delegated_by": by})
        for index, ((row, by), size) in enumerate(
            zip(turns, sizes or [1 + i % 3 for i in range(len(turns))], strict=True)
        )
    ]
    fork = {"parent": "run-9", "parent_step": inherited} if inherited else {}
    return trajectory(*made, reward=1.0).model_copy(update=fork)


NESTINGS = {
    "one sub-agent": [(0, None), (1, 0), (1, 0), (0, None)],
    "two sub-agents": [(0, None), (1, 0), (0, None), (2, 2), (2, 2), (0, None)],
    "a sub-agent at the end": [(0, None), (0, None), (1, 1)],
    "a sub-agent whose row was summarised": [(0, None), (1, 0), (2, 0), (0, None)],
    "a summary after a sub-agent": [(0, None), (1, 0), (0, None), (2, None), (3, 3), (2, None)],
}


@pytest.mark.parametrize("nesting", NESTINGS, ids=str)
@pytest.mark.parametrize("inherited", [0, 1, 2])
def test_the_chain_of_sub_agents_is_the_order_in_time(nesting: str, inherited: int) -> None:
    """A reward at the end reaches each token through those that were sampled after it, whatever their row."""
    run = rollout(*NESTINGS[nesting], inherited=inherited)
    sizes = [1 + i % 3 for i in range(len(run.turns))]
    rewards = [0.5 * (i + 1) for i in range(len(run.turns))]
    by_hand = [
        rewards[i] if last else 0.0
        for i in range(inherited, len(sizes))
        for last in [False] * (sizes[i] - 1) + [True]
    ]
    values = [math.sin(k) for k in range(len(by_hand))]
    chain = reward_chain(run, rewards)
    expected = by_definition(by_hand, values, 0.9, 0.8)
    advantages, returns = chain_gae(chain, laid(chain, values, elsewhere=99.0), discount=0.9, lam=0.8)
    assert sampled(chain, chain.rewards) == by_hand
    assert sampled(chain, advantages) == pytest.approx(expected)
    assert sampled(chain, returns) == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])


def test_every_token_of_a_sub_agent_gets_the_return_of_the_rollout() -> None:
    chain = reward_chain(rollout(*NESTINGS["one sub-agent"]), [0, 0, 0, 1.0])
    _, returns = chain_gae(chain, [[0.0] * len(row.ids) for row in chain.rows], discount=1, lam=1)
    assert set(sampled(chain, returns)) == {1.0}


@given(st.permutations(range(4)))
def test_the_order_of_the_rows_changes_nothing(order: list[int]) -> None:
    chain = reward_chain(rollout(*NESTINGS["a summary after a sub-agent"]), [0.1, 0.2, 0.3, 0.4, 0.5, 1.0])
    values = laid(chain, [math.cos(k) for k in range(12)], elsewhere=7.0)
    shuffled = Chain(rows=tuple(chain.rows[i] for i in order), rewards=tuple(chain.rewards[i] for i in order))
    plain = chain_gae(chain, values, discount=0.9, lam=0.7)
    moved = chain_gae(shuffled, [values[i] for i in order], discount=0.9, lam=0.7)
    assert moved == tuple([numbers_of[i] for i in order] for numbers_of in plain)


def test_the_reward_of_a_turn_without_tokens_stands_on_the_token_before_it() -> None:
    """A turn that ended before its first token does not take the rollout's reward with it."""
    chain = reward_chain(rollout((0, None), (1, 0), (0, None), sizes=[2, 2, 0]), [0.0, 0.25, 1.0])
    assert sampled(chain, chain.rewards) == [0, 0, 0, 1.25]


@given(st.lists(st.lists(st.tuples(numbers, st.booleans()), max_size=6), min_size=1, max_size=4))
def test_whitened_advantages_have_mean_zero_and_deviation_one(rows: list[list[tuple[float, bool]]]) -> None:
    masks = [[int(m) for _, m in row] for row in rows]
    white = whitened([[a for a, _ in row] for row in rows], masks)
    flat = [a for row, mask in zip(white, masks, strict=True) for a, m in zip(row, mask, strict=True) if m]
    assert all(a == 0 for r, k in zip(white, masks, strict=True) for a, m in zip(r, k, strict=True) if not m)
    given_flat = [a for row in rows for a, m in row if m]
    if not flat or min(given_flat) == max(given_flat):
        assert set(flat) <= {0.0}
        return
    assert sum(flat) == pytest.approx(0, abs=1e-6)
    if max(given_flat) - min(given_flat) > 1e-3:
        assert math.sqrt(sum(a * a for a in flat) / len(flat)) == pytest.approx(1, abs=1e-3)
