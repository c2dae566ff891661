"""Groups hold the rollouts of one task, each once."""

from __future__ import annotations

import math

import pytest
from builders import trajectory

from nano_rl.learn.groups import Group, form_groups, group_metrics
from nano_shared.types import StopReason


def test_groups_form_by_task_key_in_order_of_appearance() -> None:
    runs = [trajectory(run_id=str(i), key=key) for i, key in enumerate(["b", "a", "b", "a", "b"])]
    groups = form_groups(iter(runs))
    assert [(g.task_key, [t.id for t in g.trajectories]) for g in groups] == [
        ("b", ["0", "2", "4"]),
        ("a", ["1", "3"]),
    ]


def test_no_trajectories_form_no_groups() -> None:
    assert form_groups([]) == []
    with pytest.raises(ValueError, match="no trajectories"):
        Group(task_key="a", trajectories=())


def test_missing_reward_is_nan_and_zero_is_zero() -> None:
    group = Group(
        task_key="task-0",
        trajectories=tuple(trajectory(run_id=str(i), reward=r) for i, r in enumerate([0.0, None, 1.0])),
    )
    assert group.rewards_G[0] == 0.0
    assert math.isnan(group.rewards_G[1])
    assert group.rewards_G[2] == 1.0


@pytest.mark.parametrize("stop", [s for s in StopReason if s.ours])
def test_failure_that_is_ours_has_no_reward_whatever_the_verdict_says(stop: StopReason) -> None:
    group = Group(task_key="task-0", trajectories=(trajectory(reward=0.0, stop=stop),))
    assert math.isnan(group.rewards_G[0])


def test_timeout_that_the_policy_caused_keeps_its_zero() -> None:
    run = trajectory(reward=0.0, stop=StopReason.MAX_SECONDS)
    assert Group(task_key="task-0", trajectories=(run,)).rewards_G == (0.0,)


def test_run_counts_once() -> None:
    with pytest.raises(ValueError, match=r"holds run 'same' 2 times"):
        form_groups([trajectory(run_id="same"), trajectory(run_id="same"), trajectory(run_id="other")])


def test_rollout_of_another_task_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollouts of other tasks: \['b'\]"):
        Group(task_key="a", trajectories=(trajectory(key="a"), trajectory(run_id="run-1", key="b")))


def test_two_tasks_under_one_key_share_no_baseline() -> None:
    with pytest.raises(ValueError, match="mixes 2 tasks under one key"):
        form_groups([trajectory(run_id="1"), trajectory(run_id="2", prompt="Do something else.")])


def test_metrics_count_rollouts_and_leave_out_what_was_not_scored() -> None:
    runs = [
        trajectory(run_id=str(i), key=k, reward=r)
        for i, (k, r) in enumerate([("a", 1.0), ("a", 0.0), ("b", None)])
    ]
    metrics = group_metrics(form_groups(runs))
    assert metrics == {
        "groups": 2.0, "rollouts": 3.0, "frac_zero_std": 0.5, "frac_singleton": 0.5,
        "frac_unscored": pytest.approx(1 / 3), "frac_truncated": 0.0, "reward_mean": 0.5,
        "reward_min": 0.0, "reward_max": 1.0, "reward_std": pytest.approx(0.5**0.5),
        **{f"completions/{name}_length": 3.0 for name in ("mean", "min", "max", "p95", "mean_terminated")},
        "tools/call_frequency": 0.0, "tools/failure_frequency": 0.0,
    }  # fmt: skip
    assert "reward_mean" not in group_metrics(form_groups(runs[2:]))
