"""What a step learns from: every task in turn, groups whole, and those without a signal replaced."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from builders import trajectory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from looping import TASKS, Loop, same, tiny_model

from nano_rl.gather.step_groups import TaskOrder, by_group
from nano_rl.training_record import read_used
from nano_shared.types import Split, Trajectory
from nano_suites.curriculum import Curriculum
from nano_suites.drawing import make_tasks

DEAD = {task.key for task in TASKS[:2]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(size=st.integers(1, 9), draws=st.lists(st.integers(1, 12), max_size=30), stop=st.integers(0, 30))
def test_nothing_is_skipped_or_comes_early_whatever_is_drawn(size: int, draws: list[int], stop: int) -> None:
    keys = [str(i) for i in range(size)]
    order = TaskOrder(keys, seed=3)
    seen: Counter[int] = Counter()
    for number, count in enumerate(draws):
        if number == stop:  # another process goes on from the state
            state, order = order.state(), TaskOrder(keys, seed=3)
            order.restore(state)
        drawn = order.draw(count)
        assert len(drawn) == len(set(drawn)) == min(count, size)
        seen.update(drawn)
        times = [seen[place] for place in range(size)]
        assert max(times) - min(times) <= 2
        if sum(times) % size == 0 and all(size % c == 0 for c in draws[: number + 1] if c <= size):
            assert max(times) - min(times) <= 1


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(taken=st.sets(st.integers(0, 6)), count=st.integers(0, 9))
def test_what_a_step_has_is_not_drawn_again(taken: set[int], count: int) -> None:
    order = TaskOrder([str(i) for i in range(7)], seed=0)
    drawn = order.draw(count, taken={str(i) for i in taken})
    assert not set(drawn) & taken
    assert len(drawn) == min(count, 7 - len(taken))


def test_a_curriculum_draws_others_than_a_step_has() -> None:
    tasks = make_tasks(levels=[0], n=6, seed=1, split=Split.TRAIN, views=["copy"])
    curriculum = Curriculum(tasks, seed=1)
    first = curriculum.draw(0, 4)
    more = curriculum.draw(0, 4, taken={task.key for task in first})
    assert len(more) == 2
    assert len({task.key for task in (*first, *more)}) == 6


def score(run: Trajectory) -> float:
    """Equal within the groups of some tasks, and not equal within those of the others."""
    if run.task.key in DEAD:
        return 0.0
    twins.append(run.task.key)
    return float(twins.count(run.task.key) % 2)


twins: list[str] = []


def steps(loop: Loop, refill: int) -> tuple[list[list[str]], list[dict[str, float]]]:
    """Task keys of each step, and its metrics."""
    twins.clear()
    rows: list[dict[str, float]] = []
    loop.weights = loop.go(steps=2, refill=refill, score=score, on_step=lambda _, __, v: rows.append(v))  # type: ignore[attr-defined]
    used = read_used(loop.folder / "used.jsonl")
    assert all(len(group["runs"]) == 2 for line in used for group in line["groups"])
    return [[group["task"] for group in line["groups"]] for line in used], rows


def test_ac_07_groups_without_a_signal_are_replaced_whole(tiny: Path, tmp_path: Path) -> None:
    plain, without = steps(Loop(tiny, tmp_path / "a"), 0)
    assert [len(keys) for keys in plain] == [2, 2]
    assert [row["refill_rounds"] for row in without] == [0, 0]
    loop = Loop(tiny, tmp_path / "b")
    refilled, rows = steps(loop, 3)
    for keys, row in zip(refilled, rows, strict=True):
        assert len(keys) == len(set(keys))
        assert sum(key not in DEAD for key in keys) == 2  # as many groups with a signal as the step wants
        dead = sum(key in DEAD for key in keys)
        assert row["refill_groups"] == dead
        assert (row["refill_rounds"] > 0) == (dead > 0)
        assert row["frac_zero_std"] == dead / len(keys)
    assert sum(row["refill_groups"] for row in rows) > 0
    again = Loop(tiny, tmp_path / "c")
    assert steps(again, 3)[0] == refilled
    assert same(loop.weights, again.weights)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_refill_ends_where_its_rounds_or_the_tasks_do(tiny: Path, tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    Loop(tiny, tmp_path).go(steps=2, refill=9, score=lambda _: 0.0, on_step=lambda _, __, v: rows.append(v))
    assert [row["groups"] for row in rows] == [len(TASKS), len(TASKS)]
    assert [row["refill_rounds"] for row in rows] == [2, 2]
    rows.clear()
    Loop(tiny, tmp_path / "one").go(
        steps=1, refill=1, score=lambda _: 0.0, on_step=lambda _, __, v: rows.append(v)
    )
    assert [row["groups"] for row in rows] == [4]


def test_runs_of_earlier_tasks_and_forks_are_groups_of_their_own() -> None:
    run, other = trajectory(key="asked"), trajectory(key="earlier", run_id="run-1")
    fork = run.model_copy(update={"id": "fork", "parent": run.id, "parent_step": 1})
    found = by_group([run.task], [other, run, fork])
    assert found == {"asked": [run], "earlier": [other], fork.group_key: [fork]}
    assert next(iter(found)) == "asked"
