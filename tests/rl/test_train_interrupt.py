"""Signals: the first one finishes the step and saves, the second stops at once, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from looping import CONFIG, Loop, same, tiny_model
from torch import nn

from nano_rl.commands.progress import LOGGED, bar
from nano_rl.learn.config import OfflineConfig
from nano_rl.learn.learner import Learner
from nano_rl.resume import States, TrainingStopped
from nano_rl.train_fixed_rows import train_rows
from nano_shared.command_line import interrupted_in_time
from nano_shared.errors import Interrupted

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_the_step_and_saves(
    number: signal.Signals, tiny: Path, tmp_path: Path
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    expected = Loop(tiny, tmp_path / "whole").go(steps=2)
    loop = Loop(tiny, tmp_path / "stopped")
    sent: list[int] = []

    def send(*_: object) -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    with pytest.raises(TrainingStopped, match="stopped after step 1 of 2, which is saved") as stopped:
        loop.go(steps=2, save_every=7, on_run=send)
    assert stopped.value.exit_code == 130
    assert States(loop.folder / "states").steps() == [0, 1]
    assert same(loop.go(steps=2, save_every=7), expected)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_signal_in_the_last_step_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path)
    loop.go(steps=1, on_step=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert len(loop.used) == CONFIG.prompts_per_step * CONFIG.group_size


def test_a_signal_saves_the_step_of_a_training_on_rows_which_goes_on(tmp_path: Path) -> None:
    steps: list[int] = []

    def go() -> int:
        def do_step(learner: Learner, indices: list[int]) -> dict[str, float]:
            learner.step += 1
            return {"seen": 1.0}

        def on_step(done: int, total: int, values: dict[str, float]) -> None:
            steps.append(done)
            if len(steps) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        torch.manual_seed(0)
        config = OfflineConfig(batch=1, save_every=10)
        return train_rows(nn.Linear(1, 1), [()] * 3, config, tmp_path, on_step, do_step)

    with pytest.raises(TrainingStopped, match="stopped after step 2 of 3, which is saved under"):
        go()
    assert go() == 3
    assert steps == [1, 2, 3]


def test_a_training_on_rows_ends_in_its_time_with_its_whole_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, totals = 0.0, list[int]()
    monkeypatch.setattr("nano_rl.train_fixed_rows.time.monotonic", lambda: now)

    def do_step(learner: Learner, indices: list[int]) -> dict[str, float]:
        nonlocal now
        learner.step, now = learner.step + 1, now + (10.0 if learner.step < 2 else 20.0)
        totals.append(learner.steps)
        return {"seen": 1.0}

    config = OfflineConfig(batch=1)
    rows = [()] * 30
    done = train_rows(nn.Linear(1, 1), rows, config, tmp_path, lambda *_: None, do_step, until=100.0)
    # ten steps fit at the pace of the first, six at that of all
    assert (done, now, totals) == (6, 100.0, [30, 10, 10, 7, 6, 6])


def test_a_bar_says_what_is_kept_after_ctrl_c() -> None:
    told = "rollouts: interrupted after 1 of 4, which are in the log; the same command begins anew"

    def go() -> None:
        with bar("rollouts", 4, LOGGED) as progress:
            progress.advance()
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=told):
        go()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_is_interrupted_by_either_signal(number: signal.Signals) -> None:
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {one: signal.signal(one, handler) for one, handler in usual.items()}
    try:
        with pytest.raises(KeyboardInterrupt), interrupted_in_time():
            os.kill(os.getpid(), number)
        assert {one: signal.getsignal(one) for one in usual} == usual
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@pytest.mark.slow
def test_the_second_signal_stops_at_once(tiny: Path, tmp_path: Path) -> None:
    Loop(tiny, tmp_path).go(steps=1)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom looping import Loop\n"
        "from nano_shared.command_line import lazy_app, run_command\n"
        "def score(run):\n"
        "    print('hanging', flush=True); time.sleep(600)\n"
        "loop = Loop(*map(Path, sys.argv[1:]))\n"
        "def train():\n"
        "    loop.go(score=score, resume=True)\n"
        "run_command(lazy_app('x', {'train': ('__main__:train', '')}, help=''), ['train'])"
    )
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tiny), str(tmp_path)], stdout=subprocess.PIPE, text=True,
        stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "hanging\n"
    child.send_signal(signal.SIGINT)
    assert child.stderr is not None
    while "finishing this step, then saving" not in (line := child.stderr.readline()):
        assert line, "it ended at the first signal"
    child.send_signal(signal.SIGINT)
    _, told = child.communicate()
    assert child.returncode == 130
    assert "Traceback" not in told
    # step 1 was in flight
    states = States(tmp_path / "states")
    assert states.steps() == [0, 1]
    assert states.read(1)[0].step == 1
