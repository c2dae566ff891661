"""Signals: the first one finishes the step and saves, the second stops at once, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from looping import CONFIG, Loop, same, tiny_model

from nano_rl.resume import States, TrainingStopped

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
