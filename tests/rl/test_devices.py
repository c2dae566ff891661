"""Placement: a device is a setting, and nothing is made on the CPU by accident."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import build
from typer.testing import CliRunner

from integration.tiny_model import build_tiny
from nano_coder.cli import cli
from nano_coder.models.local.engine import Engine, kv_bound, rows_together
from nano_coder.models.local.policy import LocalPolicy, Lockstep
from nano_coder.models.weights import place
from nano_coder.run.execution import RunSettings, Runtime
from nano_rl.gather import rollouts
from nano_shared.errors import UsageError
from nano_shared.types import Task


def test_auto_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert place("auto") == place("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place("auto") == torch.device("cuda")
    assert place("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match=r"--device cuda:2: PyTorch .* sees 2 CUDA devices here"):
        place("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="sees no CUDA device here; use --device auto or cpu") as refused:
        place("cuda")
    assert refused.value.exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_server_is_on_the_device_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build_tiny(tmp_path, ["def f(x):\n    return x\n"] * 9, hidden=64, layers=1)
    monkeypatch.setenv("NANO_DEVICE", "cuda")
    with pytest.raises(UsageError, match="sees no CUDA device here"):
        CliRunner().invoke(cli, ["serve", "--model", str(tiny), "--port", "0"], catch_exceptions=False)


def test_off_the_cpu_rows_are_those_that_memory_holds_and_agents_twice_as_many() -> None:
    assert rows_together(torch.device("cpu"), 1, 1) == 64
    cuda, of_7b = torch.device("cuda"), 2 * 28 * 4 * 128 * 2
    assert kv_bound(cuda, memory=80 << 30) == 16 << 30
    assert kv_bound(cuda, memory=8 << 30) == kv_bound(torch.device("cpu")) == 4 << 30
    assert rows_together(cuda, kv_bound(cuda, memory=24 << 30), of_7b) == 87
    assert rows_together(cuda, 1, of_7b) == 1
    agents = {}
    for place_of in ("cpu", "meta"):
        engine = Engine(build("llama").to(place_of), eos_ids=frozenset(), context_limit=200, kv_bytes=1 << 20)
        template: Any = None
        policy = LocalPolicy(engine, template, id="tiny")
        assert (type(policy._scheduler) is Lockstep) == (place_of == "cpu")
        agents[place_of] = policy.agents_together / engine.max_batch
    assert agents == {"cpu": 1, "meta": 2}


@pytest.mark.parametrize(("set_to", "expected"), [(None, 6), (2, 2)])
def test_runs_at_a_time_are_those_that_were_set(
    set_to: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(rollouts, "run_side_by_side", lambda *_, at_once, **_more: seen.append(at_once) or [])
    policy: Any = SimpleNamespace(agents_together=6)
    unused: Any = None
    runtime = Runtime(policy=policy, sandbox=unused, store=unused, settings=RunSettings(at_once=set_to))
    rollouts.collect([Task(key="k", prompt="p")], runtime, group_size=9)
    assert seen == [expected]


@pytest.mark.slow
def test_everything_runs_on_another_device_and_gives_the_same_numbers() -> None:
    script = Path(__file__).with_name("on_fake_device.py")
    done = subprocess.run([sys.executable, str(script), "llama"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    # sampler, trainer, critic, DPO and reward model with all weights; three of them with an adapter
    assert len(done.stdout.splitlines()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-oss", "lfm2", "qwen3", "gemma2", "mixtral", "gpt2"])
def test_further_families_run_on_another_device(family: str) -> None:
    script = Path(__file__).with_name("on_fake_device.py")
    subprocess.run([sys.executable, str(script), family], check=True)
