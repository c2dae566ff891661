"""Advantages against hand-computed numbers, and the ways in which they must never go wrong."""

from __future__ import annotations

import math

import pytest
from builders import trajectory, turn
from hypothesis import given
from hypothesis import strategies as st

from nano_rl.learn.advantages import group_advantages, group_samples
from nano_rl.learn.groups import Group, form_groups, group_metrics, is_dead
from nano_rl.learn.objectives import Baseline, Std

BASELINES: tuple[Baseline, ...] = ("mean", "rloo")
STDS: tuple[Std, ...] = ("none", "sample", "population")

rewards = st.lists(st.none() | st.just(math.nan) | st.floats(-1e6, 1e6), max_size=9)
every_setting = pytest.mark.parametrize(("baseline", "std"), [(b, s) for b in BASELINES for s in STDS])


def near(values: list[float]) -> object:
    return pytest.approx(values, abs=5e-6)


@every_setting
@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, 0.1 + 0.2, -7.3])
def test_ac_01_group_without_variation_gets_exactly_zero(value: float, baseline: Baseline, std: Std) -> None:
    assert group_advantages([value] * 8, baseline=baseline, std=std) == [0.0] * 8


def test_ac_01_groups_without_variation_are_reported() -> None:
    runs = [
        trajectory(run_id=f"{key}{i}", key=key, reward=r)
        for key, r in (("a", 1.0), ("b", None))
        for i in "12"
    ]
    runs += [trajectory(run_id="c1", key="c", reward=1.0), trajectory(run_id="c2", key="c", reward=0.0)]
    assert group_metrics(form_groups(runs))["frac_zero_std"] == pytest.approx(2 / 3)


@every_setting
@pytest.mark.parametrize("odd", [0.0, 0.3])
def test_ac_02_seven_to_one_split_stays_bounded(odd: float, baseline: Baseline, std: Std) -> None:
    advantages = group_advantages([0.95] * 7 + [odd], baseline=baseline, std=std)
    # |reward - mean| of one in n is at most sqrt(n - 1) deviations; rloo stretches it by n / (n - 1)
    assert max(map(abs, advantages)) <= math.sqrt(7) * 8 / 7
    assert advantages[:7] == [advantages[0]] * 7
    assert advantages[7] < 0 < advantages[0]


def test_ac_02_variation_is_decided_by_equality_not_by_a_rounded_deviation() -> None:
    # the float mean of these equal values is not the value, so a computed advantage would not be zero
    equal = [0.235] * 7
    assert math.fsum(equal) / 7 != 0.235
    assert group_advantages(equal, std="sample", eps=1e-30) == [0.0] * 7
    smallest = [1.0, math.nextafter(1.0, 2.0)]
    assert not is_dead(smallest)
    assert all(map(math.isfinite, group_advantages(smallest, std="sample")))


@every_setting
def test_ac_03_singleton_gets_zero(baseline: Baseline, std: Std) -> None:
    assert group_advantages([5.0], baseline=baseline, std=std) == [0.0]
    assert group_advantages([None, 5.0, None], baseline=baseline, std=std) == [0.0] * 3


def test_ac_03_singleton_group_is_flagged() -> None:
    group = Group(task_key="task-0", trajectories=(trajectory(reward=1.0),))
    assert group.singleton
    assert group_metrics([group])["frac_singleton"] == 1.0


@pytest.mark.parametrize(
    ("baseline", "std", "expected"),
    [
        ("mean", "none", [0.75, -0.25, -0.25, -0.25]),
        ("mean", "sample", [1.49970, -0.49990, -0.49990, -0.49990]),
        ("mean", "population", [1.73165, -0.57722, -0.57722, -0.57722]),
        ("rloo", "none", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("none", "none", [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_ac_04_conventions_on_one_success_in_four(
    baseline: Baseline, std: Std, expected: list[float]
) -> None:
    assert group_advantages([1, 0, 0, 0], baseline=baseline, std=std) == near(expected)


def test_ac_04_sample_and_population_deviation_on_two_in_four() -> None:
    assert group_advantages([1, 1, 0, 0], std="sample") == near([0.86588, 0.86588, -0.86588, -0.86588])
    assert group_advantages([1, 1, 0, 0], std="population") == near([0.99980, 0.99980, -0.99980, -0.99980])


def test_ac_04_default_is_mean_only() -> None:
    assert group_advantages([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("missing", [None, math.nan])
def test_ac_05_unscored_row_leaves_the_baseline(missing: float | None) -> None:
    # mean of the valid rows is 2; counting the invalid one as 0 would make it 1.5
    assert group_advantages([1, 3, 2, missing]) == [-1.0, 1.0, 0.0, 0.0]
    assert group_advantages([1, 3, 2, missing], baseline="rloo") == [-1.5, 1.5, 0.0, 0.0]


def test_ac_05_unscored_row_leaves_the_deviation() -> None:
    assert group_advantages([1, 0, None], std="sample") == [*group_advantages([1, 0], std="sample"), 0.0]


def test_ac_05_unscored_rollout_leaves_the_loss() -> None:
    runs = tuple(trajectory(run_id=f"run-{i}", reward=r) for i, r in enumerate([1.0, None, 0.0]))
    samples = group_samples(Group(task_key="task-0", trajectories=runs))
    assert [(s.run_id, s.advantage) for s in samples] == [("run-0", 0.5), ("run-2", -0.5)]


def test_ac_08_one_advantage_for_each_rollout_on_all_its_rows() -> None:
    forked = trajectory(
        turn(2, 1), turn(4, 2, row=1, index=1), turn(3, 1, row=2, index=2), run_id="a", reward=1.0
    )
    plain = [trajectory(run_id=name, reward=0.0) for name in "bcd"]
    samples = group_samples(Group(task_key="task-0", trajectories=(forked, *plain)))
    assert [s.run_id for s in samples] == ["a", "a", "a", "b", "c", "d"]
    # statistics over rows would give a mean of 1/2 and an advantage of 1/2
    assert [s.advantage for s in samples] == [0.75, 0.75, 0.75, -0.25, -0.25, -0.25]


def test_no_baseline_is_the_reward_itself_whatever_the_group() -> None:
    assert group_advantages([1.0, 1.0, None], baseline="none") == [1.0, 1.0, 0.0]


def test_std_without_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a baseline"):
        group_advantages([1, 0], baseline="none", std="sample")


def test_infinite_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="finite or None"):
        group_advantages([1.0, math.inf])


@every_setting
@given(values=rewards)
def test_advantages_are_finite_and_zero_where_unscored(
    baseline: Baseline, std: Std, values: list[float | None]
) -> None:
    advantages = group_advantages(values, baseline=baseline, std=std)
    assert len(advantages) == len(values)
    assert all(map(math.isfinite, advantages))
    assert all(a == 0.0 for a, r in zip(advantages, values, strict=True) if r is None or math.isnan(r))


@given(values=st.lists(st.integers(-1000, 1000), min_size=2, max_size=9), shift=st.integers(-1000, 1000))
def test_baselines_centre_and_ignore_a_common_shift(values: list[int], shift: int) -> None:
    for baseline in BASELINES:
        advantages = group_advantages(values, baseline=baseline)
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-9)
        assert group_advantages([v + shift for v in values], baseline=baseline) == pytest.approx(
            advantages, abs=1e-9
        )


@given(values=st.lists(st.integers(-50, 50), min_size=2, max_size=9))
def test_rloo_is_the_reward_against_the_mean_of_the_others(values: list[int]) -> None:
    expected = [v - sum(values[:i] + values[i + 1 :]) / (len(values) - 1) for i, v in enumerate(values)]
    assert group_advantages(values, baseline="rloo") == pytest.approx(expected, abs=1e-9)
