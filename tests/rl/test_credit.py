"""Credit of turns and of several objectives, against closed forms."""

from __future__ import annotations

import math

import pytest
from builders import terms, trajectory, turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_rl.learn.advantages import (
    credit_group,
    discounted_returns,
    group_advantages,
    group_credit,
    group_samples,
    summed_advantages,
    turn_advantages,
)
from nano_rl.learn.batch import make_batches
from nano_rl.learn.groups import Group
from nano_shared.types import StopReason, Trajectory

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
finite = st.floats(-100, 100)


def test_returns_by_hand() -> None:
    assert discounted_returns([1.0, 0.0, 2.0], 0.5) == [1.5, 1.0, 2.0]
    assert discounted_returns([1.0, 2.0, 3.0], 0.0) == [1.0, 2.0, 3.0]
    assert discounted_returns([], 0.9) == []


@unhurried
@given(finite, st.integers(1, 30), st.floats(0, 0.99))
def test_returns_of_a_constant_are_the_geometric_sum(r: float, n: int, discount: float) -> None:
    returns = discounted_returns([r] * n, discount)
    for t, value in enumerate(returns):
        assert value == pytest.approx(r * (1 - discount ** (n - t)) / (1 - discount), abs=1e-9)


@unhurried
@given(finite, st.integers(1, 30), st.floats(0, 1))
def test_a_reward_at_the_end_is_discounted_by_the_turns_to_it(r: float, n: int, discount: float) -> None:
    returns = discounted_returns([0.0] * (n - 1) + [r], discount)
    assert returns == pytest.approx([r * discount ** (n - 1 - t) for t in range(n)])


@unhurried
@given(
    st.lists(st.tuples(finite, st.integers(1, 5)), min_size=2, max_size=6), st.sampled_from(["mean", "rloo"])
)
def test_undiscounted_rewards_at_the_end_give_the_advantages_of_rollouts(
    runs: list[tuple[float, int]], baseline: str
) -> None:
    rewards = [[0.0] * (n - 1) + [r] for r, n in runs]
    whole = group_advantages([r for r, _ in runs], baseline=baseline)  # type: ignore[arg-type]
    for of_turns, advantage in zip(
        turn_advantages(rewards, discount=1.0, baseline=baseline),
        whole,
        strict=True,  # type: ignore[arg-type]
    ):
        assert of_turns == pytest.approx([advantage] * len(of_turns), abs=1e-9)


def test_turn_advantages_by_hand() -> None:
    # returns [1.5, 1] and [0, 0]; the rollouts' means 1.25 and 0 have the mean 0.625
    assert turn_advantages([[1.0, 1.0], [0.0, 0.0]], discount=0.5) == [[0.875, 0.375], [-0.625, -0.625]]
    rloo = turn_advantages([[1.0, 1.0], [0.0, 0.0]], discount=0.5, baseline="rloo")
    assert rloo == [[1.5, 1.0], [-1.25, -1.25]]


def test_an_unscored_rollout_leaves_the_baseline_of_the_turns() -> None:
    assert turn_advantages([[1.0], None, [0.0]], discount=1.0) == [[0.5], [], [-0.5]]
    assert turn_advantages([[1.0, 2.0], None], discount=1.0) == [[0.0, 0.0], []]
    with pytest.raises(ValueError, match="finite"):
        turn_advantages([[math.nan], [0.0]], discount=1.0)


def test_objectives_apart_tell_apart_what_their_sum_does_not() -> None:
    right, tidy = [1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 1.0]
    apart = summed_advantages([(0.5, right), (0.5, tidy)], baseline="mean", std="population", eps=1e-12)
    # deviations: sqrt(3)/4 and 1/sqrt(8)
    first = 0.5 * (0.75 / (math.sqrt(3) / 4)) + 0.5 * (-0.5 * math.sqrt(8))
    last = 0.5 * (-0.25 / (math.sqrt(3) / 4)) + 0.5 * (0.5 * math.sqrt(8))
    assert apart[0] == pytest.approx(first)
    assert apart[3] == pytest.approx(last)
    together = group_advantages([a + b for a, b in zip(right, tidy, strict=True)], std="population")
    assert together[0] == together[3]
    assert apart[0] != pytest.approx(apart[3])


@unhurried
@given(st.lists(finite, min_size=2, max_size=6), st.floats(0, 5))
def test_one_objective_is_its_own_advantage_times_its_weight(rewards: list[float], weight: float) -> None:
    apart = summed_advantages([(weight, rewards)], baseline="mean", std="sample")
    assert apart == pytest.approx([weight * a for a in group_advantages(rewards, std="sample")])


def test_objectives_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be summed"):
        summed_advantages([(1.0, [0.0, 1.0]), (1.0, [1.0])], baseline="mean", std="sample")


def two_turns(run: str, reward: float, turn_rewards: tuple[float, ...] | None) -> Trajectory:
    made = trajectory(turn(2, 3), turn(1, 2, index=1), run_id=run, reward=reward)
    assert made.verdict is not None
    return made.model_copy(update={"verdict": made.verdict.model_copy(update={"turn_rewards": turn_rewards})})


def test_turns_of_a_rollout_train_on_their_own_returns() -> None:
    group = Group(
        task_key="task-0",
        trajectories=(two_turns("a", 1.0, (0.5, 0.5)), two_turns("b", 0.0, None)),
    )
    credit = group_credit(group, terms(discount=0.5), None)
    assert credit == [[0.75 - 0.3125, 0.5 - 0.3125], [-0.3125, -0.3125]]
    samples = group_samples(group, advantages_G=credit)
    assert samples[0].advantages == (0.4375,) * 5 + (0.1875,) * 3
    (batch,) = make_batches(samples, max_tokens=100)
    row = batch.advantages_BT[batch.run_ids.index("a")]
    assert row.tolist() == pytest.approx([0, 0] + [0.4375] * 3 + [0] + [0.1875] * 2)


def test_equal_rewards_earned_in_other_turns_are_a_signal_only_for_turns() -> None:
    group = Group(
        task_key="task-0",
        trajectories=(two_turns("a", 1.0, (1.0, 0.0)), two_turns("b", 1.0, (0.0, 1.0))),
    )
    assert not credit_group(group, terms(), None).has_signal
    assert credit_group(group, terms(discount=0.9), None).has_signal


def test_settings_of_the_objective_reach_the_advantages() -> None:
    group = Group(
        task_key="task-0",
        trajectories=tuple(trajectory(turn(2, 3), run_id=f"r{i}", reward=float(i == 0)) for i in range(4)),
    )
    for chosen in (
        {"baseline": "rloo"},
        {"baseline": "none"},
        {"std": "sample"},
        {"std": "population"},
    ):
        objective = terms(**chosen)
        direct = group_advantages([1.0, 0.0, 0.0, 0.0], baseline=objective.baseline, std=objective.std)
        assert group_credit(group, objective, None) == direct


def test_each_part_is_normalised_apart_and_a_masked_rollout_leaves_every_part() -> None:
    runs = [
        trajectory(turn(2, 3), run_id=f"r{i}", reward=r, stop=s)
        for i, (r, s) in enumerate([(1.0, StopReason.FINISHED), (0.0, StopReason.FINISHED),
                                    (0.0, StopReason.MAX_TOKENS)])
    ]  # fmt: skip

    class Parts:
        def objectives(self, runs: object) -> list[tuple[float, list[float | None]]]:
            return [(1.0, [1.0, 0.0, 0.0]), (2.0, [0.0, 3.0, 9.0])]

    group = Group(task_key="task-0", trajectories=tuple(runs))
    objective = terms(normalise="each", std="population", overlong="mask")
    first, second, cut = group_credit(group, objective, Parts())  # type: ignore[arg-type]
    assert (first, second) == (pytest.approx(-1.0, abs=1e-3), pytest.approx(1.0, abs=1e-3))
    assert cut is None
