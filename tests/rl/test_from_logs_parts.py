"""The parts of training from logs: what a step takes, how old a run is, what stays, and what it is worth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import trajectory, turn
from hypothesis import given
from hypothesis import strategies as st

from nano_rl.gather.step_groups import ReplayBuffer
from nano_rl.learn.groups import Group, form_groups, to_samples
from nano_rl.learn.train_step import capped, select_by_drift
from nano_rl.logs.logged_groups import AncestorWeights, Lineage


def groups(*sizes: int, versions: int = 1) -> list[Group]:
    """A group of each size, its runs sampled by versions 0, 1, ... in turn."""
    return form_groups(
        trajectory(
            turn(2, 3, version=place % versions), run_id=f"{key}-{place}", key=f"task-{key}", reward=place % 2
        )
        for key, size in enumerate(sizes)
        for place in range(size)
    )


def buffer(of: list[Group], **changed: Any) -> ReplayBuffer:
    settings: dict[str, Any] = {"uses": 1, "max_staleness": None, "seed": 0}
    return ReplayBuffer(of, **{**settings, **changed})


def taken(drawn: list[Group]) -> list[str]:
    return [t.id for group in drawn for t in group.trajectories]


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@given(sizes, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_every_run_is_taken_as_often_as_it_may_be_and_no_oftener(
    of: list[int], count: int, most: int, uses: int, even: bool
) -> None:
    logged = buffer(groups(*of), uses=uses)
    seen: list[str] = []
    while drawn := logged.draw(count, most, version=0, even=even):
        assert len(drawn) <= count
        assert len({g.task_key for g in drawn}) == len(drawn)
        assert all(len(g.trajectories) <= most for g in drawn)
        seen += taken(drawn)
    assert sorted(seen) == sorted(run for run in logged.policy_versions for _ in range(uses))
    assert logged.left(0) == 0


@given(sizes, st.integers(0, 4), st.integers(1, 3))
def test_a_buffer_goes_on_from_its_state(of: list[int], before: int, count: int) -> None:
    one, other = buffer(groups(*of), uses=2), buffer(groups(*of), uses=2)
    for _ in range(before):
        one.draw(count, 2, 0)
    other.restore(one.state())
    for _ in range(5):
        assert taken(one.draw(count, 2, 0)) == taken(other.draw(count, 2, 0))


def test_the_youngest_runs_of_a_task_come_first_and_those_too_old_never() -> None:
    logged = buffer(groups(6, versions=3), max_staleness=1)
    assert taken(logged.draw(1, 2, version=2)) == ["0-2", "0-5"]
    assert logged.too_old(2) == 2  # those of version 0
    assert taken(logged.draw(1, 9, version=2)) == ["0-1", "0-4"]
    assert logged.draw(1, 9, version=2) == []


def test_no_small_remainder_is_left_where_nothing_else_joins() -> None:
    logged = buffer(groups(17))
    assert [len(taken(logged.draw(1, 16, 0, even=True))) for _ in range(2)] == [9, 8]


def test_what_the_policy_learned_from_before_counts_as_a_use() -> None:
    assert taken(buffer(groups(2), learned_from={"0-0"}).draw(1, 9, 0)) == ["0-1"]
    again = buffer(groups(2), learned_from={"0-0"}, uses=2)
    assert taken(again.draw(1, 9, 0)) == ["0-1", "0-0"]
    assert taken(again.draw(1, 9, 0)) == ["0-1"]


WAY = Lineage(
    weights=(
        AncestorWeights(id="now", version=100, until=100, next_runs=frozenset()),
        AncestorWeights(id="first", version=40, until=100, next_runs=frozenset({"mine"})),
        AncestorWeights(id="base", version=0, until=40, next_runs=None),
    ),
    learned_from=frozenset({"mine"}),
)


@pytest.mark.parametrize(
    ("policy", "version", "run", "expected"),
    [
        ("now", 100, "any", 100),
        ("now", 103, "any", 97),  # another training from the same weights: as far, on the other side
        ("first", 40, "any", 40),
        ("first", 60, "mine", 60),  # on the way from there to here
        ("first", 60, "other", 20),  # a training that turned off the way, all of whose own runs are known
        ("base", 25, "any", 25),  # the runs on the way from the base are not all known
        ("base", 55, "any", -55),  # longer than the way: another training
        ("stranger", 3, "any", None),
    ],
)
def test_the_age_of_a_run_is_measured_along_the_way_to_the_policy(
    policy: str, version: int, run: str, expected: int | None
) -> None:
    one = turn(2, 3, version=version)
    by = one.model_copy(update={"completion": one.completion.model_copy(update={"policy_id": policy})})
    assert WAY.policy_version(trajectory(by, run_id=run)) == expected


def test_a_row_is_no_younger_than_its_run() -> None:
    (sample,) = to_samples(trajectory(turn(2, 3, version=7)), 1.0)
    assert set(capped(sample, {"run-0": 4}).versions) == {4}
    assert set(capped(sample, {"run-0": 9}).versions) == {7}
    assert capped(sample, {}) == sample


mismatches = st.lists(
    st.lists(st.floats(-6, 6), min_size=1, max_size=6).map(torch.tensor), min_size=1, max_size=6
)


@given(mismatches, st.floats(0.05, 1))
def test_what_stays_keeps_the_bound_and_nothing_nearer_leaves(rows: list[torch.Tensor], bound: float) -> None:
    of = {f"run-{place}": row for place, row in enumerate(rows)}
    kept = select_by_drift(of, bound)
    stay = [run for run in of if run not in kept.dropped]
    if stay:
        weights = torch.cat([of[run].double() for run in stay]).exp()
        ess = float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))
        assert ess == pytest.approx(kept.ess, rel=1e-6)
        assert ess >= bound - 1e-9
        farthest = max(float(of[run].double().abs().mean()) for run in stay)
        assert all(float(of[run].double().abs().mean()) >= farthest - 1e-6 for run in kept.dropped)
    assert not kept.dropped or kept.ess_before < bound


def test_runs_that_drifted_leave_though_their_weights_are_alike() -> None:
    rows = {"near": torch.tensor([0.1, -0.1]), "gone": torch.tensor([-6.0, -6.0])}
    assert select_by_drift(rows, 0.4).dropped == frozenset()
    kept = select_by_drift(rows, 0.4, drift=0.5)
    assert kept.dropped == {"gone"}
    assert kept.drift == pytest.approx(3.05)
    assert select_by_drift({"gone": rows["gone"]}, 0.9, drift=0.5).dropped == {"gone"}
    assert select_by_drift({"gone": rows["gone"]}, 0.9).dropped == frozenset()


def test_fresh_rows_all_stay() -> None:
    kept = select_by_drift({"a": torch.zeros(3), "b": torch.zeros(2)}, 1.0)
    assert kept.dropped == frozenset()
    assert kept.metrics == {"ess_logged": 1.0, "ess_kept": 1.0, "weight_dropped": 0.0, "drift_logged": 0.0}
