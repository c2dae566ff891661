"""Rollouts ahead of time: one version old, repeatable, and whole however their worker ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from failing_worker import FAILURES
from faulty_worker import FAULT
from looping import CONFIG, TASKS, Loop, logged_groups, same, tiny_model

from nano_rl.config.training import TrainConfig
from nano_rl.gather import remote_rollouts
from nano_rl.gather.curriculum import Curriculum
from nano_rl.gather.sources import Sources
from nano_rl.learn.config import OptimizerConfig
from nano_rl.learn.metrics import read_metrics
from nano_rl.logs.used_runs import read_used
from nano_rl.record import EventKind, read_events
from nano_rl.resume.progress import TrainingStopped
from nano_rl.resume.states import States
from nano_rl.tiny_model import build_tiny
from nano_shared.errors import ConfigError, GuardTripped, RolloutsFailed, UsageError
from nano_shared.scratch import PREFIX
from nano_shared.settings import parse_config
from nano_shared.store import LogStore

# a worker imports all of torch: on a machine that is busy with other things that takes a minute each
pytestmark = pytest.mark.timeout(1800)
HERE = Path(__file__).parent
AHEAD = CONFIG.model_copy(update={"asynchronous": True, "heartbeat_seconds": 120.0, "refill": 1})
"""patient, for a machine that is busy with other things"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """However a test ends, nothing is left over: no worker, no folder that was shared with one."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(remote_rollouts, "in_memory", lambda: str(folder))
    threads = torch.get_num_threads()
    yield folder
    assert workers_of(folder) == []
    assert list(folder.glob(f"{PREFIX}rollouts-*")) == []
    assert torch.get_num_threads() == threads


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    """A training that nothing disturbed."""
    loop = Loop(tiny, tmp_path_factory.mktemp("whole"))
    loop.go(AHEAD)
    return loop


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("serves older weights", "tokens that the rollout worker sampled differ by"),
        pytest.param(
            "moves while it samples",
            "tokens that the rollout worker sampled differ by",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "moves after it sampled",
            "a probe that the rollout worker scored differ by",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ac_43_a_worker_that_samples_with_other_weights(
    fault: str, sentence: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, fault)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(remote_rollouts, "MODULE", "faulty_worker")
    rewards = iter([0.0, 1.0] * 99)
    # a rate at which one update is felt
    rate = OptimizerConfig(learning_rate=1e-2)
    with pytest.raises(GuardTripped, match=rf"step [12]: sampler and trainer log-probs of {sentence}"):
        Loop(tiny, tmp_path / "loop").go(AHEAD, score=lambda _: next(rewards), optimizer=rate)


def test_ac_43_every_step_ahead_is_held_against_the_weights_that_sampled_it(whole: Loop) -> None:
    first, *later = read_metrics(whole.folder / "metrics.jsonl")
    assert "mismatch_ahead_max" not in first
    for row in later:
        assert row["stale"] == 1 or row["skipped"]
        assert row["skipped"] or 0 <= row["mismatch_ahead_max"] <= CONFIG.guards.mismatch_max
        assert 0 <= row["worker_mismatch_max"] <= CONFIG.guards.mismatch_max


@pytest.fixture
def befall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[signal.Signals, int], None]:
    """Let that many workers get a signal in the middle of the rollouts of step 1."""

    def failing(number: signal.Signals, times: int) -> None:
        (tmp_path / "failures").write_text(f"{int(number)} {times}")
        monkeypatch.setenv(FAILURES, str(tmp_path / "failures"))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setattr(remote_rollouts, "MODULE", "failing_worker")

    return failing


def workers_of(scratch: Path) -> list[int]:
    """Processes that were started on a folder in there and still run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            # whoever else runs may have arguments that are no UTF-8
            words = (place / "cmdline").read_text(errors="replace")
            stat = (place / "stat").read_text(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if f"{scratch}/{PREFIX}rollouts-" in words and stat.rpartition(")")[2].split()[0] != "Z":
            found.append(int(place.name))
    return found


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
    assert column(whole, "worker_restarts") == [0, 0, 0]
    fresh, *stale = column(whole, "stale_tokens")
    assert fresh == 0
    assert all(tokens > 0 for tokens in stale)


def test_the_worker_opens_the_configured_sandbox(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boxes.py").write_text(
        "from pathlib import Path\n"
        "from nano_coder.sandbox.backend import open_sandbox\n"
        "def told(python):\n"
        "    Path(__file__).with_name('opened').touch()\n"
        "    return open_sandbox(python=python)\n"
    )
    monkeypatch.setenv("NANO_SANDBOX", f"{tmp_path}/boxes.py:told")
    Loop(tiny, tmp_path / "loop").go(AHEAD, steps=2)
    assert (tmp_path / "opened").exists()


def test_stale_tokens_are_weighted_by_what_sampled_them_and_trip_no_guard(whole: Loop) -> None:
    """Log-probs of the first step are the trainer's own; later ones differ from them by what was learned."""
    assert column(whole, "skipped") == [0, 0, 0]
    assert column(whole, "stale") == [0, 1, 1]
    bound = AHEAD.guards.mismatch_max
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
def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(
    tiny: Path, whole: Loop, tmp_path: Path, befall: Callable[..., None]
) -> None:
    befall(signal.SIGKILL, 1)
    loop = Loop(tiny, tmp_path / "killed")
    loop.go(AHEAD)
    assert ended_alike(loop, whole)
    assert column(loop, "worker_restarts") == [0, 1, 0]
    assert len(set(loop.used)) == len(loop.used) == len(whole.used)
    (event,) = [e for e in read_events(loop.folder) if e.kind == EventKind.WORKER]
    assert "the rollout worker ended with SIGKILL" in event.text
    assert event.step == 1


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(
    tiny: Path, whole: Loop, tmp_path: Path, befall: Callable[..., None]
) -> None:
    befall(signal.SIGSTOP, 1)
    loop = Loop(tiny, tmp_path / "hung")
    loop.go(AHEAD, heartbeat_seconds=20.0)
    assert ended_alike(loop, whole)
    assert sum(column(loop, "worker_restarts")) >= 1
    assert any("was silent for 20 seconds" in event.text for event in read_events(loop.folder))


@pytest.mark.slow
def test_a_worker_that_always_dies_ends_the_training_with_its_state_saved(
    tiny: Path, whole: Loop, tmp_path: Path, befall: Callable[..., None]
) -> None:
    befall(signal.SIGKILL, 4)
    loop = Loop(tiny, tmp_path / "dying")
    with pytest.raises(RolloutsFailed, match=r"ended with SIGKILL.* as did 3 before it.*--async") as failed:
        loop.go(AHEAD)
    assert failed.value.exit_code == 1
    assert States(loop.folder / "states").steps() == [0, 1]
    loop.go(AHEAD, resume=True)
    assert ended_alike(loop, whole)


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
def test_a_signal_finishes_the_step_and_ends_the_worker(tiny: Path, whole: Loop, tmp_path: Path) -> None:
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
def test_a_worker_ends_with_its_trainer(tiny: Path, tmp_path: Path, scratch: Path) -> None:
    code = (
        "import sys, tempfile\nfrom pathlib import Path\nfrom looping import Loop\n"
        "from nano_rl.gather import remote_rollouts\nfrom test_overlap import AHEAD\n"
        "tempfile.tempdir = sys.argv[3]\nremote_rollouts.in_memory = lambda: sys.argv[3]\n"
        "hang = lambda *_: (print('learning', flush=True), __import__('time').sleep(600))\n"
        "Loop(*map(Path, sys.argv[1:3])).go(AHEAD, on_step=hang)"
    )
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    trainer = subprocess.Popen(
        [sys.executable, "-c", code, str(tiny), str(tmp_path / "a"), str(scratch)], stdout=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "learning\n"
    assert len(workers_of(scratch)) == 1
    trainer.kill()
    trainer.communicate()
    for _ in range(600):
        if not workers_of(scratch):
            break
        time.sleep(0.1)
    remote_rollouts.sweep(str(scratch))  # as the next process does that makes a scratch folder


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
    assert column(loop, "mismatch_max")[0] < AHEAD.guards.mismatch_max


@pytest.mark.slow
def test_what_the_worker_refuses_is_told_as_the_trainer_would(tmp_path: Path) -> None:
    own = tiny_model(tmp_path / "own")
    loop = Loop(own, tmp_path / "loop")

    def replaced(_: torch.nn.Module) -> None:
        build_tiny(own, ["other words"], hidden=32, layers=1, max_positions=256, vocab_size=300, seed=3)

    with pytest.raises(RolloutsFailed, match="holds other weights than when this training opened it") as told:
        loop.go(AHEAD, before=replaced)
    assert told.value.exit_code == 2


def test_contradictions_are_refused(tiny: Path, tmp_path: Path) -> None:
    for settings, sentence in (
        ({"objective": {"tis_cap": None}}, "importance weights correct: set tis_cap"),
        ({"group_size": 0}, "group_size = 0 rolls out none"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            parse_config(TrainConfig, {"asynchronous": True, **settings})
    groups = logged_groups(tiny, tmp_path / "log.db")
    with pytest.raises(UsageError, match="give --tasks FILE instead of --from-logs"):
        Loop(tiny, tmp_path).go(AHEAD, sources=Sources(logged=groups))
