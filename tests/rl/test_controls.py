"""Controls of an objective: temperature, entropy, KL and reference from step to step, and over a resume."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from looping import CONFIG, Loop, same, tiny_model

from nano_rl.config.training import TrainConfig
from nano_rl.learn.config import ObjectiveConfig
from nano_rl.learn.metrics import read_metrics
from nano_rl.learn.objectives.controls import (
    AdaptiveKL,
    Controlled,
    Controls,
    EntropyTarget,
    ReferenceRefresh,
    TemperatureSchedule,
)
from nano_shared.errors import UsageError
from nano_shared.store import LogStore

NOW = Controlled(temperature=1.0, entropy_bonus=0.0, beta=0.1)
FILE = """
from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.clip import clipped
from nano_rl.learn.objectives.controls import *

ALL = Objective(surrogate=clipped, defaults={"beta": 0.1}, controls=(
    TemperatureSchedule(start=1.5, end=1.0, steps=4), EntropyTarget(target=100.0, rate=0.01),
    AdaptiveKL(target=1e-9), ReferenceRefresh(every=2)))
KL = Objective(surrogate=clipped, controls=(AdaptiveKL(target=0.1),))
"""


@pytest.fixture
def objective(tmp_path: Path) -> str:
    (tmp_path / "steady.py").write_text(FILE)
    return f"{tmp_path / 'steady.py'}:"


def config_of(name: str, **more: object) -> TrainConfig:
    changed = {"objective": ObjectiveConfig(objective=name, **more), "steps": 4, "group_size": 6}
    return CONFIG.model_copy(update=changed)


def test_the_temperature_follows_its_line_or_half_a_cosine() -> None:
    line = TemperatureSchedule(start=2.0, end=1.0, steps=4)
    curve = TemperatureSchedule(start=2.0, end=1.0, steps=4, shape="cosine")
    at = [[way.advance(NOW, {}, step).temperature for step in range(6)] for way in (line, curve)]
    assert at[0] == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]
    assert at[1] == pytest.approx([2.0, 1.853553, 1.5, 1.146447, 1.0, 1.0], abs=1e-6)


def test_the_entropy_bonus_rises_below_its_target_and_is_off_above_it() -> None:
    control, now, seen = EntropyTarget(target=0.5, rate=0.1, most=0.25), NOW, []
    for entropy in (0.4, 0.4, 0.4, 0.6, 0.4, 0.6, 0.6, 0.6, 0.4):
        now = control.advance(now, {"entropy": entropy}, 1)
        seen.append(now.entropy_bonus)
    assert seen == pytest.approx([0.1, 0.2, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0, 0.1])
    assert control.advance(now, {}, 1) == now  # a step without an update says nothing


def test_beta_moves_towards_the_target_and_never_more_than_its_gain() -> None:
    control = AdaptiveKL(target=0.1, gain=0.2)
    for kl, factor in ((0.1, 1.0), (0.15, 1.1), (9.0, 1.2), (0.05, 0.9), (0.0, 0.8), (float("nan"), 1.0)):
        assert control.advance(NOW, {"kl_reference": kl}, 1).beta == pytest.approx(0.1 * factor)


def test_the_reference_is_refreshed_every_so_many_steps() -> None:
    due = [ReferenceRefresh(every=3).advance(NOW, {}, step).refresh for step in range(7)]
    assert due == [False, False, False, True, False, False, True]


def test_a_training_uses_them_and_goes_on_with_them(objective: str, tmp_path: Path) -> None:
    tiny, config = tiny_model(tmp_path / "tiny"), config_of(f"{objective}ALL")
    whole, parts = Loop(tiny, tmp_path / "whole"), Loop(tiny, tmp_path / "parts")
    expected = whole.go(config)
    parts.go(config, steps=3)
    assert same(parts.go(config, steps=4, resume=True), expected)
    rows = [read_metrics(loop.folder / "metrics.jsonl") for loop in (whole, parts)]
    names = ("temperature", "beta", "entropy_bonus", "kl_reference", "actor/kl_coef")
    assert [[r.get(n) for n in names] for r in rows[0]] == [[r.get(n) for n in names] for r in rows[1]]
    assert [row["temperature"] for row in rows[0]] == [1.5, 1.375, 1.25, 1.125]
    with LogStore.open(whole.folder / "log.db") as store:
        used = {turn.completion.sampling.temperature for run in store.trajectories() for turn in run.turns}
    assert used == {1.5, 1.375, 1.25, 1.125}
    learned = [row for row in rows[0] if not row["skipped"]]
    assert len(learned) >= 3
    assert all(b["entropy_bonus"] == pytest.approx(a["entropy_bonus"] + 0.01) for a, b in pairwise(learned))
    # the reference is the policy again at the third step, where the KL is 0 before the update
    kl = {row["step"]: row["kl_reference"] for row in learned}
    assert abs(kl[2.0]) < 1e-7 < kl[1.0]
    assert rows[0][2]["beta"] > rows[0][1]["beta"]


def test_without_controls_a_state_and_an_objective_are_what_they_were(tmp_path: Path) -> None:
    controls = Controls(CONFIG.objective, 1.0)
    assert not controls
    assert controls.applied(CONFIG.objective) is CONFIG.objective
    loop = Loop(tiny_model(tmp_path / "tiny"), tmp_path / "loop")
    loop.go(CONFIG, steps=1)
    assert "beta" not in read_metrics(loop.folder / "metrics.jsonl")[0]


def test_what_a_control_needs_is_said(objective: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with pytest.raises(
        UsageError, match=r"AdaptiveKL of objective = .* needs a reference: set objective\.beta"
    ):
        Controls(ObjectiveConfig(objective=f"{objective}KL"), 1.0)
    with pytest.raises(UsageError, match=r"TemperatureSchedule .* `asynchronous` begins a step earlier"):
        Controls(ObjectiveConfig(objective=f"{objective}ALL"), 1.0, ahead=True)
