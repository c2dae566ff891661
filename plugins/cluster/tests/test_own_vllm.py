"""vLLM that a training starts: it is ended with it, started again when it ends, and named when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from looping import CONFIG, Loop, tiny_model
from pydantic import ValidationError

from nano_cluster import own_vllm
from nano_coder.models.opening import open_weights
from nano_rl.config import TrainConfig
from nano_rl.learn.learner import prepare
from nano_rl.learn.metrics import read_metrics
from nano_rl.training_record import read_events
from nano_shared.errors import PolicyError, UsageError
from nano_shared.process import own_python

pytestmark = pytest.mark.timeout(900)
SERVER = """#!{python}
import os, sys
os.environ["NANO_SERVE_ADMIN_KEY"] = os.environ["VLLM_API_KEY"]
os.environ["NANO_HOME"] = {home!r}
given = dict(zip(sys.argv[3::2], sys.argv[4::2]))
model, port = given["--model"], given["--port"]
assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"] and "--enable-lora" in sys.argv
with open({home!r} + "/pids", "a") as pids:
    print(os.getpid(), given["--max-lora-rank"], file=pids)
from nano_coder.cli import main
sys.argv = ["nano-coder", "serve", "--model", model, "--port", port, "--set", "dtype=float32"]
main()
"""
"""what stands in the place of an environment with vLLM: a server of ours, which has the same routes"""


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], Path]:
    def write(code: str) -> Path:
        path = tmp_path / "python"
        path.write_text(code.replace("{python}", sys.executable).replace("{home!r}", repr(str(tmp_path))))
        path.chmod(0o755)
        return path

    return write


def on(python: Path, **changed: object) -> TrainConfig:
    return CONFIG.model_copy(update={"lora_rank": 4, "engine": (f"vllm:{python}",), **changed})


def pids(folder: Path) -> list[int]:
    return [int(line.split()[0]) for line in (folder / "pids").read_text().splitlines()]


def is_there(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.slow  # two servers import torch, one after the other
def test_a_training_starts_it_and_ends_it(tmp_path: Path, python: Callable[[str], Path]) -> None:
    loop = Loop(tiny_model(tmp_path / "tiny"), tmp_path / "loop")
    killed: list[int] = []

    def on_step(*_: object) -> None:
        if not killed:
            killed.append(pids(tmp_path)[0])
            os.kill(killed[0], 9)

    loop.go(on(python(SERVER)), on_step=on_step)
    rows = read_metrics(loop.folder / "metrics.jsonl")
    assert len(rows) == CONFIG.steps
    assert all(0 <= row["engine_mismatch_max"] <= 1e-4 for row in rows)
    first, second = pids(tmp_path)
    assert first != second, "it was started again"
    assert not is_there(first)
    assert not is_there(second)
    assert (tmp_path / "pids").read_text().split()[1] == "8", "the smallest rank that vLLM can be set to"
    said = "\n".join(event.text for event in read_events(loop.folder))
    assert f"vLLM starts; what it says is in {loop.folder / 'vllm.log'}" in said
    assert "left out" in said
    assert (loop.folder / "vllm.log").stat().st_size > 0


@pytest.mark.slow
def test_a_training_ends_soon_when_it_ends_for_good(tmp_path: Path, python: Callable[[str], Path]) -> None:
    loop = Loop(tiny_model(tmp_path / "tiny"), tmp_path / "loop")

    def on_step(*_: object) -> None:
        path = python("#!/bin/sh\nexit 1\n")
        os.kill(pids(tmp_path)[0], 9)
        assert path.exists()

    with pytest.raises(PolicyError, match="no engine is ready"):
        loop.go(on(python(SERVER)), on_step=on_step)
    assert len(pids(tmp_path)) == 1


def test_it_ends_when_the_trainer_is_gone(tmp_path: Path) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    asked = {"command": [sys.executable, "-c", code], "log": str(tmp_path / "log")}
    supervisor = subprocess.Popen(
        own_python("-m", own_vllm.__name__, json.dumps(asked)), stdin=subprocess.PIPE
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    assert supervisor.wait(20) == 0
    assert not is_there(int((tmp_path / "pid").read_text()))


def test_the_base_of_an_adapter_is_written_without_it(tmp_path: Path) -> None:
    opened = open_weights(str(tiny_model(tmp_path / "tiny")))
    before = {name: value.clone() for name, value in opened.loaded.model.state_dict().items()}
    model = prepare(opened.loaded.model, lora_rank=4, seed=0)
    adapted = replace(opened, loaded=replace(opened.loaded, model=model, kind="adapter"))
    written = open_weights(str(own_vllm._base_folder(adapted, tmp_path / "base")))
    after = written.loaded.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert own_vllm._base_folder(opened, tmp_path / "no") == (tmp_path / "tiny").resolve()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "is no Python that can be run; name that of an environment with vLLM"),
        ("#!/bin/sh\necho 'ModuleNotFoundError: No module named vllm' >&2; exit 1\n",
         "-m vllm ended before it answered: ModuleNotFoundError: No module named vllm"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_named(
    code: str | None, said: str, tmp_path: Path, python: Callable[[str], Path]
) -> None:
    loop = Loop(tiny_model(tmp_path / "tiny"), tmp_path / "loop")
    with pytest.raises(UsageError, match=said):
        loop.go(on(python(code) if code else tmp_path / "none"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"engine": "vllm:v/bin/python,http://one:8000/v1"},
            "give http://HOST:PORT/v1, or vllm:PYTHON alone",
        ),
        ({"engine": "vllm:v/bin/python", "ray": "auto"}, "is reached from here alone"),
    ],
)
def test_it_is_alone_and_here(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate({"steps": 1, **settings})
