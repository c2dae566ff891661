"""The controller holds the success of groups in its band, moves levels, and goes on exactly where it was."""

from __future__ import annotations

import json
from functools import cache
from random import Random

import pytest
from builders import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_rl.learn.groups import Group
from nano_shared.errors import UsageError
from nano_shared.types import Task, Trajectory
from nano_suites.curriculum import Curriculum

POOL = [
    Task(key=f"{view}-{level}-{number}", prompt="Do it.", level=level, view=view)
    for level in range(5)
    for view in ("fix", "body")
    for number in range(12)
]


@cache
def run_of(number: int, reward: float | None) -> Trajectory:
    return trajectory(run_id=f"run-{number}", reward=reward)


def group_of(task: Task, rewards: list[float | None]) -> Group:
    runs = tuple(run_of(n, r).model_copy(update={"task": task}) for n, r in enumerate(rewards))
    return Group(task_key=task.key, trajectories=runs)


def learn(
    curriculum: Curriculum, steps: int, seed: int, *, first: int = 0, pace: float = 0.02
) -> list[float]:
    """A learner whose chance falls by level and rises with practice; the mean success of every step."""
    rng, skill, told = Random(seed), 0.6 + pace * first, []
    for step in range(first, first + steps):
        groups = []
        for task in curriculum.draw(step, 8):
            chance = min(0.98, max(0.02, skill - 0.35 * int(task.level or 0)))
            groups.append(group_of(task, [float(rng.random() < chance) for _ in range(6)]))
        curriculum.record(groups)
        skill += pace
        told.append(sum(sum(g.rewards_G) for g in groups) / (6 * len(groups)))
    return told


@pytest.mark.parametrize("seed", range(3))
def test_group_success_is_held_between_20_and_80_per_cent(seed: int) -> None:
    told = learn(Curriculum(POOL, seed), 60, seed)
    assert sum(0.2 <= x <= 0.8 for x in told[10:]) >= 0.9 * len(told[10:])


@pytest.mark.parametrize("seed", range(3))
def test_without_the_controller_the_same_learner_leaves_the_band(seed: int) -> None:
    class Even(Curriculum):
        def draw(self, step: int, count: int) -> list[Task]:
            return Random(f"{seed} {step}").sample([t for t in POOL if t.level == 0], count)

    told = learn(Even(POOL, seed), 60, seed)
    assert sum(0.2 <= x <= 0.8 for x in told[10:]) < 0.5 * len(told[10:])


def test_levels_open_from_below_as_they_are_mastered_and_close_where_nothing_succeeds() -> None:
    curriculum = Curriculum(POOL)
    assert {t.level for t in curriculum.draw(0, 8)} == {0}
    learn(curriculum, 50, 0)
    opened = curriculum.open_level
    assert opened >= 2
    for step in range(50, 80):
        curriculum.record([group_of(t, [0.0] * 4) for t in curriculum.draw(step, 8)])
    assert curriculum.open_level == 0


def test_a_cell_outside_the_band_is_drawn_seldom_but_not_never() -> None:
    curriculum = Curriculum([t for t in POOL if t.level == 0])
    hard = next(t for t in POOL if t.level == 0 and t.view == "body")
    even = next(t for t in POOL if t.level == 0 and t.view == "fix")
    for _ in range(4):
        curriculum.record([group_of(hard, [0.0] * 4), group_of(even, [0.0, 1.0, 0.0, 1.0])])
    assert curriculum.weights() == {(0, "body"): 0.02, (0, "fix"): 1.0}
    drawn = [t.view for step in range(300) for t in curriculum.draw(step, 1)]
    assert 0 < drawn.count("body") < 30


def test_rollouts_without_a_reward_count_for_nothing() -> None:
    curriculum = Curriculum(POOL)
    before = curriculum.state()
    curriculum.record([group_of(POOL[0], [None, None])])
    assert curriculum.state() == before
    curriculum.record([group_of(POOL[0], [None, 1.0])])
    assert curriculum.state() != before


@given(st.integers(0, 12), st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_a_restored_controller_goes_on_bit_for_bit(cut: int, seed: int) -> None:
    whole = Curriculum(POOL, seed)
    learn(whole, cut, seed)
    resumed = Curriculum(POOL, seed)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert learn(resumed, 6, seed, first=cut) == learn(whole, 6, seed, first=cut)
    assert resumed.state() == whole.state()


def test_no_task_comes_twice_in_a_step_and_a_small_pool_is_enough() -> None:
    curriculum = Curriculum(POOL[:5])
    assert len({t.key for t in curriculum.draw(0, 5)}) == 5
    assert len(curriculum.draw(1, 8)) == 5


def test_what_no_curriculum_can_place_is_refused() -> None:
    with pytest.raises(UsageError, match="has no level"):
        Curriculum([Task(key="k", prompt="p")])
    with pytest.raises(UsageError, match="at least one task"):
        Curriculum([])
    saved = Curriculum(POOL[:12]).state()
    with pytest.raises(UsageError, match="other levels and views"):
        Curriculum(POOL).restore(saved)
