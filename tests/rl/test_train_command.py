"""`nano-rl train` as a user calls it: what it prints, what it leaves, and how it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_rl.cli import cli
from nano_rl.command_setup import training_folder
from nano_rl.config import TrainConfig
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.training_record import (
    EVENTS,
    RECORD,
    ROLLOUTS,
    TOKENIZER,
    EventKind,
    read_events,
    read_record,
    read_rollouts,
)
from nano_shared.checkpoint import latest_checkpoint
from nano_shared.errors import CheckpointError, NanoError, UsageError
from nano_shared.store import LogStore
from nano_shared.types import Split
from nano_suites.drawing import make_tasks

TASKS = make_tasks(levels=[0], n=3, seed=1, split=Split.TRAIN, views=["copy"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NANO_HOME with a task file and a random tiny model."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("home")
    (home / "tasks.jsonl").write_text("".join(task.model_dump_json() + "\n" for task in TASKS))
    texts = [m.content for t in TASKS for m in first_messages(COMPACT_1, t, ())] + ["@submit\n1"]
    build_tiny(home / "tiny", texts, hidden=32, layers=1, max_positions=200, vocab_size=300)
    return home


def train(home: Path, *arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(cli, ["train", "--name", "mine", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.slow
def test_a_training_is_recorded_watched_and_goes_on_from_its_name_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(home))
    folder = home / "trainings" / "mine"
    settings = home / "run.toml"
    settings.write_text("steps = 1\nsave_every = 1\n[optimizer]\nwarmup_steps = 1\n")
    told, error = train(
        home, "--model", str(home / "tiny"), "--tasks", str(home / "tasks.jsonl"), "--config", str(settings),
        "--prompts", "1", "--group-size", "2", "--set", "guards.patience=9", "--json",
        "--log-to", "tensorboard",
        "--limit", "max_turns=2", "--limit", "max_completion_tokens=4",
    )  # fmt: skip
    report = json.loads(told)
    assert report["checkpoint"] == str(home / "checkpoints" / "mine")
    assert report["metrics"]["rollouts"] == 2
    assert error == ""

    record = read_record(folder)
    assert record is not None
    config = TrainConfig.model_validate(record.config)
    assert (config.steps, config.group_size, config.optimizer.warmup_steps) == (1, 2, 1)
    assert config.optimizer.learning_rate == TrainConfig().optimizer.learning_rate
    assert Tokenizer.from_file(str(folder / TOKENIZER)).get_vocab_size() > 0
    assert list((folder / "tensorboard").iterdir())

    first = (home / "checkpoints" / "mine" / "manifest.json").read_bytes()
    kept = {name: (folder / name).read_bytes() for name in (RECORD, EVENTS)}
    for refused, sentence in (
        (["--resume"], "training mine is finished after step 1: --steps N above 1 goes on"),
        (
            ["--resume", "--steps", "2", "--learning-rate", "1e-3"],
            "optimizer.learning_rate was 0.0001 and is",
        ),
    ):
        with pytest.raises(NanoError, match=sentence):
            train(home, *refused)
    assert {name: (folder / name).read_bytes() for name in (RECORD, EVENTS)} == kept

    told, error = train(home, "--resume", "--steps", "2")
    assert told.splitlines()[-1] == str(home / "checkpoints" / "mine-2")
    assert "step 2/2" in error
    assert "checkpoint mine stays as it is" in error
    assert (home / "checkpoints" / "mine" / "manifest.json").read_bytes() == first
    assert [row["step"] for row in read_metrics(folder / METRICS)] == [0, 1]
    assert {step: len(runs) for step, runs in read_rollouts(folder / ROLLOUTS).items()} == {0: 2, 1: 2}
    kinds = [event.kind for event in read_events(folder)]
    assert kinds == [EventKind.STARTED, EventKind.FINISHED, EventKind.RESUMED, EventKind.FINISHED]
    row = read_metrics(folder / METRICS)[-1]
    assert row["seconds_rollout"] >= (row["seconds_generate"] or 0) > 0
    assert row["tokens_rollout"] > 0
    assert row["seconds_train"] is not None
    with LogStore.open(home / "log.db") as store:
        runs = list(store.trajectories())
    assert {run.task.limits.max_turns for run in runs} == {2}
    assert {turn.completion.sampling.max_tokens for run in runs for turn in run.turns} == {4}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "x", "--from-logs"], "give either --tasks FILE or --env ENV, or --from-logs"),
        ([], "give either --tasks FILE or --env ENV, or --from-logs"),
        (["--from-logs", "--curriculum"], "--curriculum chooses among tasks"),
        (["--tasks", "x", "--group-size", "0"], "--group-size 0 leaves nothing to train on"),
        (["--resume"], "there is no training other to resume"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    home: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(home))
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(cli, ["train", "--name", "other", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    "name",
    ["latest", "Latest", "shipped", "promotions.json", "smollm2-135m-instruct", "a/b", ".x", "-x", "x" * 101],
)
def test_a_checkpoint_takes_no_name_that_means_something_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"choose another|use letters, digits"):
        training_folder(name)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_no_other_in_other_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    (tmp_path / "checkpoints" / "Fix").mkdir(parents=True)
    with pytest.raises(UsageError, match="checkpoint Fix exists already"):
        training_folder("fix")


def test_a_folder_in_the_place_of_the_pointer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made by hand, or by a nano that took every name."""
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"is a folder.*rename that folder"):
        latest_checkpoint()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--set", "objective.clip_low=0.1", "--set", "objective.clip_high=0.3"],
            "clip_low, clip_high cannot act: with one update a step",
        ),
        (["--set", "objective.clip_high=0.3", "--set", "minibatches=2"], None),
        (["--objective", "gspo"], None),
    ],
)
def test_a_clip_that_cannot_act_is_said(
    home: Path, arguments: list[str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, before anything is opened, and it is no error."""
    monkeypatch.setenv("NANO_HOME", str(home))
    (home / "no.jsonl").write_text("")
    given = ["train", "--name", "idle", "--tasks", str(home / "no.jsonl"), *arguments]
    result = CliRunner().invoke(cli, given)
    assert isinstance(result.exception, NanoError)
    assert result.stderr.count("cannot act") == bool(said)
    assert (said or "") in result.stderr
