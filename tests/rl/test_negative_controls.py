"""The mistakes that are made on purpose are those that they are called after, and end with their block."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import CONFIG, PATIENT, Loop, logged_groups, same, scored, tiny_model

from nano_rl.gather.step_groups import Sources
from nano_rl.learn.advantages import group_samples
from nano_rl.learn.groups import Group
from nano_rl.learn.objectives import ObjectiveConfig

sys.path.append(str(Path(__file__).parents[2] / "integration"))

import negative_controls
from negative_controls import dealt_over_tasks, mask_off, shuffled_rewards, unmasked, wrong_groups

BARE = f"{negative_controls.__file__}:NO_WEIGHTS"
LENIENT = PATIENT.model_copy(update={"mismatch_max": 1e9})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def logged(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, ...]:
    """Two tasks, two runs each, all four with another reward: so no mixture leaves every advantage as it was,
    in whatever order the runs of a task began."""
    one, other = logged_groups(tiny, tmp_path_factory.mktemp("log") / "log.db")
    between = tuple(scored(run, 0.25 + (run.reward or 0.0) / 2) for run in other.trajectories)
    return one, replace(other, trajectories=between)


def test_wrong_groups_hold_the_same_rollouts_of_other_tasks(logged: tuple[Group, ...]) -> None:
    mixed = dealt_over_tasks(logged)
    one, other = logged
    assert [[run.id for run in group.trajectories] for group in mixed] == [
        [one.trajectories[0].id, other.trajectories[0].id], [one.trajectories[1].id, other.trajectories[1].id]
    ]  # fmt: skip
    # each task fails first: mixed up, failures stand beside failures
    assert [group.rewards_G for group in mixed] == [(0.0, 0.25), (1.0, 0.75)]


def test_without_its_mask_a_row_trains_what_nobody_sampled(logged: tuple[Group, ...]) -> None:
    sample = group_samples(logged[0])[0]
    bare = unmasked(sample)
    assert bare.mask == (0, *[1] * (len(sample.ids) - 1))
    assert (bare.ids, bare.logprobs, bare.advantage) == (sample.ids, sample.logprobs, sample.advantage)


def settings(logged: tuple[Group, ...]) -> dict[str, Any]:
    return {
        "config": CONFIG.model_copy(update={"steps": 1, "group_size": 0, "guards": LENIENT}),
        "sources": Sources(logged=logged), "objective": ObjectiveConfig(objective=BARE), "score": None,
    }  # fmt: skip


@pytest.fixture(scope="module")
def sound(
    tiny: Path, logged: tuple[Group, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    return Loop(tiny, tmp_path_factory.mktemp("sound")).go(**settings(logged))


@pytest.mark.parametrize("control", [wrong_groups, mask_off, shuffled_rewards])
def test_a_control_changes_what_is_learned_within_its_block_alone(
    control: object, tiny: Path, logged: tuple[Group, ...], sound: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with control():  # type: ignore[operator]
        wrong = Loop(tiny, tmp_path / "wrong").go(**settings(logged))
    again = Loop(tiny, tmp_path / "again").go(**settings(logged))
    assert not same(sound, wrong)
    assert same(sound, again)
