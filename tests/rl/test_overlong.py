"""Rollouts that ran out of tokens, and groups without a signal: what leaves the loss, and what more."""

from __future__ import annotations

import pytest
from builders import terms, trajectory, turn

from nano_rl.learn.advantages import (
    credit_group,
    cut_off,
    group_credit,
    group_samples,
    length_penalty,
)
from nano_rl.learn.groups import Group
from nano_rl.learn.loss import token_weights
from nano_shared.types import Finish, StopReason, Trajectory


def group(*runs: Trajectory) -> Group:
    return Group(task_key="task-0", trajectories=runs)


def rollout(
    run_id: str, reward: float, sampled: int = 4, stop: StopReason = StopReason.FINISHED
) -> Trajectory:
    return trajectory(turn(2, sampled), run_id=run_id, reward=reward, stop=stop)


def test_ac_28_truncation_is_read_from_the_reason_that_ended_the_rollout() -> None:
    assert cut_off(rollout("a", 0.0, stop=StopReason.MAX_TOKENS))
    assert cut_off(rollout("a", 0.0, stop=StopReason.CONTEXT_FULL))
    assert not cut_off(rollout("a", 0.0, stop=StopReason.MAX_TURNS))
    assert not cut_off(rollout("a", 1.0))
    last = turn(2, 3)
    cut = last.model_copy(update={"completion": last.completion.model_copy(update={"finish": Finish.LENGTH})})
    assert cut_off(trajectory(cut))
    assert not cut_off(trajectory(cut, turn(1, 3, index=1)))


CUT = group(
    rollout("a", 1.0), rollout("b", 3.0), rollout("c", 2.0), rollout("d", 0.0, stop=StopReason.MAX_TOKENS)
)


def test_ac_28_truncated_rollouts_are_trained_by_default() -> None:
    assert group_credit(CUT, terms(), None) == [-0.5, 1.5, 0.5, -1.5]


def test_ac_28_a_masked_rollout_leaves_the_loss_the_baseline_and_the_denominator() -> None:
    objective = terms(overlong="mask")
    credit = group_credit(CUT, objective, None)
    assert credit == [-1.0, 1.0, 0.0, None]
    samples = group_samples(CUT, advantages_G=credit)
    assert [s.run_id for s in samples] == ["a", "b", "c"]
    assert token_weights(samples) == pytest.approx([1 / 12] * 3)


def test_ac_28_a_group_cut_off_whole_has_no_signal() -> None:
    gone = group(*(rollout(i, float(i), stop=StopReason.MAX_TOKENS) for i in "12"))
    assert credit_group(gone, terms(), None).has_signal
    for dead in ("drop", "keep"):
        assert not credit_group(gone, terms(overlong="mask", dead_groups=dead), None).has_signal


@pytest.mark.parametrize(
    ("sampled", "expected"), [(4, 0.0), (6, 0.0), (7, -0.25), (9, -0.75), (10, -1.0), (30, -1.0)]
)
def test_ac_28_soft_punishment_of_length(sampled: int, expected: float) -> None:
    assert length_penalty(rollout("a", 1.0, sampled), limit=10, buffer=4) == expected


def test_ac_28_the_punishment_enters_the_reward_before_the_baseline() -> None:
    equal = group(rollout("a", 1.0, 4), rollout("b", 1.0, 8))
    shape = {"overlong": "shape", "overlong_limit": 10, "overlong_buffer": 4}
    assert not credit_group(equal, terms(), None).has_signal
    assert credit_group(equal, terms(**shape), None).has_signal
    assert group_credit(equal, terms(**shape), None) == [0.25, -0.25]
    assert group_credit(equal, terms(**shape, discount=1.0), None) == [[0.25], [-0.25]]


DEAD = group(rollout("a", 1.0), rollout("b", 1.0))


def test_ac_06_dead_groups_are_kept_or_left_out_as_one_says() -> None:
    """Kept, they weigh in the denominator, and under a KL they have a gradient."""
    live = group(rollout("c", 1.0), rollout("d", 0.0))
    for choice, tokens in (("drop", 8), ("keep", 16)):
        objective = terms(dead_groups=choice)
        chosen = [g for g in (DEAD, live) if credit_group(g, objective, None).has_signal]
        samples = [s for g in chosen for s in group_samples(g, advantages_G=group_credit(g, objective, None))]
        assert token_weights(samples) == pytest.approx([1 / tokens] * len(samples))
        assert [s.advantage for s in samples][-2:] == [0.5, -0.5]


def test_ac_06_a_group_without_a_score_is_never_kept() -> None:
    nothing = group(rollout("a", 1.0, stop=StopReason.SANDBOX_ERROR))
    assert not credit_group(nothing, terms(dead_groups="keep"), None).has_signal


def test_without_a_baseline_equal_rewards_are_a_signal() -> None:
    assert not credit_group(DEAD, terms(), None).has_signal
    assert credit_group(DEAD, terms("reinforce"), None).has_signal
    assert not credit_group(group(rollout("a", 0.0)), terms("reinforce"), None).has_signal
    assert credit_group(DEAD, terms("ppo"), None).has_signal
