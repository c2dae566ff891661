"""Success on held-out tasks while a training runs: it is measured, kept, resumed, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from looping import CONFIG, PATIENT, TASKS, Given, parity, runtime_at, same, tiny_model, weights

from nano_coder.models.opening import open_weights
from nano_rl.gather.rollouts import HELD_OUT_FILE, HeldOut
from nano_rl.gather.step_groups import Sources, refuse_trained
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import METRICS, read_metrics, read_rows
from nano_rl.train import train
from nano_shared.errors import UsageError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def go(tiny: Path, folder: Path, *, held_out: bool, **changed: object) -> dict[str, Any]:
    """The weights after three steps on three tasks, measured or not on two others."""
    folder.mkdir(exist_ok=True)
    opened = open_weights(str(tiny))
    model = prepare(opened.loaded.model, lora_rank=0, seed=0)
    unseen = TASKS[3:] if held_out else ()
    with (runtime := runtime_at(folder / "log.db")).store:
        train(
            model, opened, runtime, Sources(tasks=TASKS[:3], reward=Given(parity), held_out=unseen),
            CONFIG.model_copy(update={"guards": PATIENT, **changed}), folder,
        )  # fmt: skip
    return weights(model)


@pytest.mark.slow
def test_measuring_changes_no_weight_and_covers_the_whole_training(tiny: Path, tmp_path: Path) -> None:
    assert same(go(tiny, tmp_path / "a", held_out=True), go(tiny, tmp_path / "b", held_out=False))
    rows = read_rows(tmp_path / "a" / HELD_OUT_FILE)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["graded"] == 2 and row["low"] <= row["success"] <= row["high"] for row in rows)
    assert [row["held_out"] for row in read_metrics(tmp_path / "a" / METRICS)] == [
        row["success"] for row in rows[:3]
    ]


@pytest.mark.slow
def test_a_training_that_goes_on_measures_each_step_once(tiny: Path, tmp_path: Path) -> None:
    go(tiny, tmp_path / "a", held_out=True, steps=2)
    resumed = go(tiny, tmp_path / "a", held_out=True, resume=True)
    assert same(resumed, go(tiny, tmp_path / "b", held_out=True))
    once, whole = (read_rows(tmp_path / name / HELD_OUT_FILE) for name in ("a", "b"))
    assert once == whole


def test_a_long_training_is_measured_some_ten_times(tmp_path: Path) -> None:
    unseen = HeldOut(tasks=TASKS, folder=tmp_path, seed=0)
    assert [step for step in range(61) if unseen.due(step, 60)] == list(range(0, 61, 6))


def test_a_task_that_is_trained_on_is_not_held_out() -> None:
    refuse_trained(Sources(tasks=TASKS[:2], held_out=TASKS[2:]))
    with pytest.raises(UsageError, match="1 of the 3 held-out tasks are among those trained on"):
        refuse_trained(Sources(tasks=TASKS[:3], held_out=TASKS[2:]))
