"""Where metrics go: TensorBoard really, and a sentence where a library is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nano_rl.cli import cli
from nano_rl.training_record import SINKS, open_sinks
from nano_shared.errors import ConfigError, UsageError
from nano_view.sinks import run_id


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_gets_every_metric_and_a_resumed_run_replaces_its_steps(tmp_path: Path) -> None:
    (sink,) = open_sinks(["tensorboard", "tensorboard"], name="x", folder=tmp_path, settings={})
    for step in range(5):
        sink.write(step, {"loss": step / 2, "success/all": 1.0})
    sink.close()
    (again,) = open_sinks(["tensorboard"], name="x", folder=tmp_path, settings={})
    for step in range(3, 6):
        again.write(step, {"loss": 9.0})
    again.close()
    assert scalars(tmp_path / "tensorboard", "loss") == [(0, 0), (1, 0.5), (2, 1), (3, 9), (4, 9), (5, 9)]
    # those of a killed process are gone, all metrics alike
    assert scalars(tmp_path / "tensorboard", "success/all") == [(0, 1), (1, 1), (2, 1)]


def test_nothing_is_written_before_the_first_row(tmp_path: Path) -> None:
    (sink,) = open_sinks(["tensorboard"], name="x", folder=tmp_path, settings={})
    sink.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_unknown_place_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"--log-to: nano\.sinks has no 'mlflow'; there are tensorboard, trackio, wandb, or path",
    ):
        open_sinks(["tensorboard", "mlflow"], name="x", folder=tmp_path, settings={})


@pytest.mark.parametrize("kind", SINKS)
def test_a_missing_library_is_a_sentence_with_the_way_out(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)  # as Python itself remembers what cannot be imported
    with pytest.raises(ConfigError, match=f"--log-to {kind} needs the library {kind}: pip install {kind}"):
        open_sinks([kind], name="x", folder=tmp_path, settings={})


def test_it_is_refused_before_a_model_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "wandb", None)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"key": "a", "prompt": "do it"}\n')
    arguments = [
        "train",
        "--name",
        "x",
        "--model",
        "no/such-model",
        "--tasks",
        str(tasks),
        "--log-to",
        "wandb",
    ]
    with pytest.raises(ConfigError, match="pip install wandb"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert ConfigError.exit_code == 3


def test_a_training_keeps_its_run_at_weights_and_biases(tmp_path: Path) -> None:
    assert run_id(tmp_path) == run_id(tmp_path)
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path) != run_id(tmp_path / "other")
