"""Hacking over a training: controls are rolled out, kept out of the gradient, and reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rewarded import ADD, SOLVE, new_runtime, opened, rolled

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import open_weights
from nano_rl.config import RewardConfig, TrainConfig
from nano_rl.gather.rollouts import hack_metrics
from nano_rl.gather.step_groups import Sources
from nano_rl.learn.config import GuardConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.train import train
from nano_shared.errors import UsageError
from nano_shared.types import Sampling, Split, Tampering, Verdict
from nano_suites.drawing import make_tasks
from nano_suites.impossible import controls_due, impossible, roll_controls
from nano_view.report.hacks import hack_row, hack_rows

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TASKS = tuple(make_tasks(levels=[0], n=4, seed=1, split=Split.TRAIN, views=["copy"]))


@unhurried
@given(st.integers(1, 200), st.integers(1, 100), st.floats(0, 0.5))
def test_after_every_step_the_share_of_controls_is_the_one_asked_for(
    steps: int, rollouts: int, fraction: float
) -> None:
    done = sum(controls_due(step, rollouts, fraction) for step in range(steps))
    assert abs(done - steps * rollouts * fraction) < 1 + 1e-6
    assert all(controls_due(step, rollouts, fraction) >= 0 for step in range(steps))


@pytest.mark.slow
def test_a_training_measures_hacking_and_learns_nothing_from_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    texts = [m.content for t in TASKS for m in first_messages(COMPACT_1, t, ())] + ["@submit\n1"]
    tiny = build_tiny(tmp_path / "tiny", texts, hidden=32, layers=1, max_positions=256, vocab_size=300)
    runtime = replace(new_runtime(tmp_path), sampling=Sampling(temperature=1.0, max_tokens=6))
    weights = open_weights(str(tiny))
    config = TrainConfig(
        steps=2, prompts_per_step=2, group_size=2, controls=0.25, guards=GuardConfig(patience=100),
        reward=RewardConfig(parts={"tests": {"weight": 1}, "format": {"weight": 0.2}}),
    )  # fmt: skip
    model = prepare(weights.loaded.model, lora_rank=0, seed=0)
    reward = opened(tests=1, format=0.2)
    used = train(model, weights, runtime, Sources(tasks=TASKS, reward=reward), config, tmp_path)
    controls = [run for run in runtime.store.trajectories() if run.task.is_control]
    assert len(controls) == 2
    assert not set(used) & {run.id for run in controls}
    rows = read_metrics(tmp_path / METRICS)
    assert [row["controls"] for row in rows] == [1, 1]
    assert [row["control_passes"] for row in rows] == [0, 0]
    assert [row["rollouts"] for row in rows] == [4, 4]
    ordinary = [run for run in runtime.store.trajectories() if not run.task.is_control]
    assert all("format" in run.verdict.components for run in ordinary if run.verdict)


def test_tasks_that_cannot_be_impossible_leave_no_controls_to_roll_out(tmp_path: Path) -> None:
    runtime, sources = new_runtime(tmp_path), Sources(tasks=(ADD.model_copy(update={"hidden": None}),))
    config = TrainConfig(controls=0.25)
    assert roll_controls(sources, runtime, config, step=0, rollouts=0, on_run=print) == []
    with pytest.raises(UsageError, match="leave `controls` out"):
        roll_controls(sources, runtime, config, step=0, rollouts=4, on_run=print)


def test_findings_are_counted_by_kind_and_passes_apart(tmp_path: Path) -> None:
    runtime = new_runtime(tmp_path)
    honest, other = rolled(runtime, SOLVE, SOLVE)
    control = rolled(runtime, SOLVE, task=impossible(ADD))[0]
    assert other.verdict is not None
    assert control.verdict is not None

    def found(verdict: Verdict, *kinds: str) -> Verdict:
        return verdict.model_copy(update={"tampering": tuple(Tampering(kind=k, detail="") for k in kinds)})

    hacked = other.model_copy(update={"verdict": found(other.verdict, "exit", "exit", "skip")})
    passed = control.model_copy(update={"verdict": found(control.verdict, "impossible_passed")})
    assert hack_metrics([honest, hacked], [control, passed]) == {
        "tampered": 1, "controls": 2, "controls_graded": 2, "control_passes": 1,
        "tampering/exit": 1, "tampering/skip": 1,
    }  # fmt: skip


def test_many_steps_are_gathered_into_few_rows_that_lose_nothing() -> None:
    steps = [{"step": float(i), "rollouts": 2.0, "controls_graded": 1.0} for i in range(47)]
    rows = hack_rows(steps)
    assert len(rows) <= 20
    assert (rows[0].first_step, rows[-1].last_step) == (0, 46)
    assert sum(row.rollouts for row in rows) == hack_row(steps).rollouts == 94
