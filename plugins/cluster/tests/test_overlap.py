"""Rollouts ahead of time: one version old, repeatable, and whole however the training ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from looping import CONFIG, TASKS, Loop, same, tiny_model

from nano_cluster.rollout_queue import WeightsCopy
from nano_rl.config import TrainConfig
from nano_rl.gather.step_groups import Sources
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.metrics import read_metrics
from nano_rl.resume import TrainingStopped
from nano_rl.training_record import read_used
from nano_shared.errors import ConfigError, GuardTripped
from nano_shared.settings import parse_config
from nano_shared.store import LogStore
from nano_suites.curriculum import Curriculum

AHEAD = CONFIG.model_copy(update={"asynchronous": True, "refill": 1})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """A training that nothing disturbed."""
    loop = Loop(tiny, tmp_path_factory.mktemp("whole"))
    loop.go(AHEAD)
    return loop


def test_ac_43_a_copy_of_other_weights_is_found(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy keeps the weights that it had first, and says that it has the newest."""
    load, loaded = WeightsCopy.load, []

    def load_once(copy: WeightsCopy, trained: dict[str, torch.Tensor], version: int) -> None:
        loaded.append(version)
        if len(loaded) == 1:
            return load(copy, trained, version)
        copy.trained, copy.version = trained, version
        return None

    monkeypatch.setattr(WeightsCopy, "load", load_once)
    rewards = iter([0.0, 1.0] * 99)
    # a rate at which one update is felt
    rate = OptimizerConfig(learning_rate=1e-2)
    with pytest.raises(GuardTripped, match=r"step 2: .*log-probs of tokens that were rolled out ahead"):
        Loop(tiny, tmp_path / "loop").go(AHEAD, score=lambda _: next(rewards), optimizer=rate)


def test_ac_43_every_step_ahead_is_held_against_the_weights_that_sampled_it(whole: Loop) -> None:
    first, *later = read_metrics(whole.folder / "metrics.jsonl")
    assert "mismatch_ahead_max" not in first
    for row in later:
        assert row["stale"] == 1 or row["skipped"]
        assert row["skipped"] or 0 <= row["mismatch_ahead_max"] <= 1e-4


def tasks_of(loop: Loop) -> list[list[str]]:
    return [[group["task"] for group in line["groups"]] for line in read_used(loop.folder / "used.jsonl")]


def column(loop: Loop, name: str) -> list[float]:
    return [row[name] for row in read_metrics(loop.folder / "metrics.jsonl")]


def ended_alike(loop: Loop, other: Loop) -> bool:
    """The same weights, after the same tasks."""
    ended = [{n: p.detach() for n, p in one.model.named_parameters()} for one in (loop, other)]
    return same(*ended) and tasks_of(loop) == tasks_of(other)


def test_each_step_learns_from_what_the_version_before_it_sampled(whole: Loop) -> None:
    with LogStore.open(whole.folder / "log.db") as store:
        steps = [
            [store.get(run) for group in line["groups"] for run in group["runs"]]
            for line in read_used(whole.folder / "used.jsonl")
        ]
    versions = [{t.completion.policy_version for run in runs for t in run.turns} for runs in steps]
    assert versions == [{0}, {0}, {1}]
    assert column(whole, "staleness") == [0, 1, 1]
    fresh, *stale = column(whole, "stale_tokens")
    assert fresh == 0
    assert all(tokens > 0 for tokens in stale)


def test_stale_tokens_are_weighted_by_what_sampled_them_and_trip_no_guard(whole: Loop) -> None:
    """Log-probs of the first step are the trainer's own; later ones differ from them by what was learned."""
    assert column(whole, "skipped") == [0, 0, 0]
    assert column(whole, "stale") == [0, 1, 1]
    bound = 1e-4
    fresh, *stale = column(whole, "mismatch_max")
    assert fresh < bound
    assert all(gap > bound for gap in stale)
    assert all(share < 1 for share in column(whole, "ess")[1:])


@pytest.mark.slow
def test_a_seed_repeats_a_training_bit_for_bit(tiny: Path, whole: Loop, tmp_path: Path) -> None:
    again = Loop(tiny, tmp_path / "again")
    again.go(AHEAD)
    assert ended_alike(again, whole)
    assert len(set(again.used)) == len(again.used)


@pytest.mark.slow
def test_a_training_killed_in_any_step_ends_as_if_it_had_not_been(
    tiny: Path, whole: Loop, tmp_path: Path
) -> None:
    class Killed(BaseException):
        """Stands for a process that is gone: nothing in the loop catches it."""

    def die(*_: object) -> None:
        raise Killed

    broken = Loop(tiny, tmp_path / "broken")
    with pytest.raises(Killed):  # with the first step in flight, then with the second one under way
        broken.go(AHEAD, on_run=die)
    for _ in range(2):
        with pytest.raises(Killed):
            broken.go(AHEAD, on_step=die)
    broken.go(AHEAD)
    assert ended_alike(broken, whole)
    assert column(broken, "staleness") == [0, 1, 1]


@pytest.mark.slow
def test_a_signal_finishes_the_step(tiny: Path, whole: Loop, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path / "stopped")
    sent: list[int] = []

    def send(*_: object) -> None:
        if not sent:  # the second one would stop at once
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(TrainingStopped, match="stopped after step 1 of 3, which is saved"):
        loop.go(AHEAD, on_run=send, save_every=7)
    loop.go(AHEAD, save_every=7)
    assert ended_alike(loop, whole)


@pytest.mark.slow
def test_a_curriculum_chooses_from_what_was_learned_a_step_before(tiny: Path, tmp_path: Path) -> None:
    def go(folder: Path, *stops: int) -> Loop:
        loop = Loop(tiny, folder)
        for steps in stops:
            sources = Sources(tasks=TASKS, curriculum=Curriculum(TASKS, 0))
            if steps < 3:
                with pytest.raises(KeyboardInterrupt):
                    loop.go(AHEAD, sources=sources, on_step=_interrupted)
            else:
                loop.go(AHEAD, sources=sources)
        return loop

    assert ended_alike(go(tmp_path / "a", 3), go(tmp_path / "b", 1, 3))


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_adapter_is_published_alone(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path / "adapter")
    loop.go(AHEAD.model_copy(update={"lora_rank": 2, "steps": 2}))
    assert column(loop, "staleness") == [0, 1]
    assert column(loop, "mismatch_max")[0] < 1e-4


def test_contradictions_are_refused() -> None:
    for settings, sentence in (({"group_size": 0}, "group_size = 0 rolls out none"),):
        with pytest.raises(ConfigError, match=sentence):
            parse_config(TrainConfig, {"asynchronous": True, **settings})
