"""Training on several ranks, as torchrun starts them: equal to one process, saved, killed, resumed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import looping
import pytest
import torch
from looping import TASKS, tiny_model
from safetensors.torch import load_file

from nano_cluster.rank_rollouts import deal
from nano_cluster.ranks import RankLost
from nano_rl.learn.metrics import read_metrics
from nano_rl.training_record import read_used
from nano_shared.errors import LogError

SCRIPT = Path(__file__).with_name("on_ranks.py")
LOOPING = Path(looping.__file__).parent
BOUND = 1e-10


def torchrun(ranks: int, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*program, "--nproc-per-node", str(ranks), *arguments]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(LOOPING), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def on_ranks(ranks: int, *arguments: str, forked: bool = False) -> dict[str, Any]:
    """What the script says on ranks that torchrun starts, or that it forks itself."""
    alone = [sys.executable, str(SCRIPT), str(ranks), *arguments]
    done = subprocess.run(
        alone if forked else torchrun(ranks, str(SCRIPT), *arguments),
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def equal_to_one_process(told: dict[str, Any], cases: int) -> None:
    assert len(told) == cases
    for name, case in told.items():
        assert case["same_metrics"], name
        assert case["metrics"] <= BOUND, name
        assert max(case["gaps"].values()) <= BOUND, (name, case["gaps"])
        assert case["grad_norm"] > 0.05, name  # so that the clip acts
        assert case["step"] == 1


def test_two_ranks_equal_one_process() -> None:
    told = on_ranks(2, "exact", "untied", "an adapter, recomputed", "one micro-batch", forked=True)
    equal_to_one_process(told, 3)
    assert told["untied"]["micro_batches"] == 3  # of which one rank has two
    assert told["one micro-batch"]["micro_batches"] == 1  # and one rank none


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_equals_one_process(ranks: int) -> None:
    equal_to_one_process(on_ranks(ranks, "exact"), 8)


def rollouts_equal_those_of_one_process(told: dict[str, Any]) -> None:
    assert all(told["same"]), told["same"]  # tasks, seeds, tokens and versions of both steps
    assert told["runs"] == 15
    assert told["logprobs"] < 1e-5  # of float32, in other batches
    assert told["scores"] <= BOUND  # under the weights of the step, and of the reference
    assert max(map(abs, told["loss"])) <= BOUND
    assert told["weights"] <= BOUND
    assert told["grad_norm"] > 0.05


def test_rollouts_on_two_ranks_equal_those_of_one_process(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny")
    told = on_ranks(2, "rollouts", str(tmp_path), forked=True)
    rollouts_equal_those_of_one_process(told)
    assert told["dealt"] == [0, 0, 1, 1, 1]


@pytest.mark.slow
def test_rollouts_on_four_ranks_equal_those_of_one_process(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny")
    rollouts_equal_those_of_one_process(on_ranks(4, "rollouts", str(tmp_path)))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_what_fails_on_one_rank_is_raised_on_rank_0_and_all_end(ranks: int, tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny")
    told = on_ranks(ranks, "failing", str(tmp_path), "full", forked=True)
    assert (told["said"], told["code"]) == (f"rank {ranks - 1}: no space left", LogError.exit_code)
    assert told["others"] == [0] * (ranks - 1)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_its_rollouts_is_missed_soon(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny")
    told = on_ranks(3, "failing", str(tmp_path), "killed", forked=True)
    assert "rank 2 has been silent" in told["said"]
    assert told["code"] == RankLost.exit_code
    assert told["seconds"] < 40


@pytest.mark.slow
def test_ranks_whose_rollouts_nobody_waits_for_end_at_once(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny")
    told = on_ranks(2, "failing", str(tmp_path), "slow", forked=True)
    assert told["said"] == "no space left here"
    assert told["others"] == [RankLost.exit_code]
    assert told["seconds"] < 40


def test_groups_are_dealt_whole_in_order_and_evenly() -> None:
    assert deal([4] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert deal([4, 4], 4) == [1, 3]
    assert deal([9, 1, 1, 1], 2) == [0, 1, 1, 1]
    assert deal([5], 1) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapter", "whole"])
def test_shards_saved_on_two_ranks_are_loaded_by_three_and_by_one(kind: str, tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / kind).touch()
    saved = on_ranks(2, "save", str(tmp_path))
    assert saved["step"] == 2
    for ranks in (3, 1):
        told = on_ranks(ranks, "load", str(tmp_path))
        assert told == {
            "equal": saved["tensors"], "of": saved["tensors"], "differ": [], "copied": True, "step": 2,
            "tensors": saved["tensors"],
        }  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A NANO_HOME with a task file, a tiny model, and a reward that varies."""
    home = tmp_path_factory.mktemp("home")
    (home / "tasks.jsonl").write_text("".join(task.model_dump_json() + "\n" for task in TASKS))
    tiny_model(home / "tiny")
    (home / "parity.py").write_text(
        "def parity(completions, **columns):\n    return [float(sum(map(ord, c)) % 2) for c in completions]\n"
    )
    return home


def command(home: Path, name: str, steps: int, *more: str) -> list[str]:
    return [
        "-m", "nano_rl", "train", "--name", name, "--model", str(home / "tiny"), "--tasks",
        str(home / "tasks.jsonl"), "--steps", str(steps), "--prompts", "2", "--group-size", "4", "--reward",
        "parity:parity=1", "--set", "guards.patience=99", "--set", "max_tokens=300", "--limit",
        "max_completion_tokens=6", *more,
    ]  # fmt: skip


def train_env(home: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH", ""))))
    return environment(NANO_HOME=str(home), PYTHONPATH=path)


def run(home: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, env=train_env(home), capture_output=True, text=True, check=False)


def weights(home: Path, name: str) -> dict[str, torch.Tensor]:
    (file,) = (home / "checkpoints" / name).rglob("*.safetensors")
    return load_file(file)


@pytest.mark.slow
def test_a_training_on_two_ranks_ends_as_in_one_process(home: Path) -> None:
    one = run(home, [sys.executable, *command(home, "one", 3)])
    assert one.returncode == 0, one.stderr
    two = run(home, torchrun(2, *command(home, "two", 3)))
    assert two.returncode == 0, two.stderr
    assert two.stdout.strip().endswith(str(home / "checkpoints" / "two"))
    expected, found = weights(home, "one"), weights(home, "two")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    moved = load_file(home / "tiny" / "model.safetensors")
    assert any(not torch.equal(moved[name], found[name]) for name in found if name in moved)
    rows = [read_metrics(home / "trainings" / name / "metrics.jsonl") for name in ("one", "two")]
    assert [row["reward_mean"] for row in rows[0]] == [row["reward_mean"] for row in rows[1]]
    assert any(not row["skipped"] for row in rows[1])


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_and_the_same_command_goes_on(home: Path) -> None:
    kill_and_resume(home, kills=3, seed=1)


def kill_and_resume(home: Path, *, kills: int, seed: int) -> None:
    steps, draw = 5, random.Random(seed)
    whole = run(home, torchrun(2, *command(home, "whole", steps)))
    assert whole.returncode == 0, whole.stderr
    killed = 0
    while killed < kills:
        process = subprocess.Popen(
            torchrun(2, *command(home, "killed", steps)), env=train_env(home), stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        victims = _wait_for_ranks(process.pid)
        _wait_for_a_step(home / "trainings" / "killed", process)
        time.sleep(draw.uniform(0, 1))
        if process.poll() is not None:  # it was done before it could be killed
            break
        os.kill(draw.choice(victims), signal.SIGKILL)
        began = time.monotonic()
        _, error = process.communicate(timeout=120)
        assert process.returncode != 0, error
        assert time.monotonic() - began < 90
        killed += 1
    assert killed
    done = run(home, torchrun(2, *command(home, "killed", steps)))
    assert done.returncode == 0, done.stderr
    expected, found = weights(home, "whole"), weights(home, "killed")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    used = [
        [line["step"] for line in read_used(home / "trainings" / n / "used.jsonl")]
        for n in ("whole", "killed")
    ]
    assert used[0] == used[1]


def _wait_for_ranks(parent: int, number: int = 2) -> list[int]:
    while len(found := list(_children(parent))) < number:
        time.sleep(0.05)
    return found


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if int(fields[1]) == parent and b"nano_rl" in (folder / "cmdline").read_bytes():
            yield int(folder.name)


def _wait_for_a_step(training: Path, process: subprocess.Popen[str]) -> None:
    """Until a state is saved that was not there before, or the training ends."""
    before = set(training.glob("states/*/state.json"))
    while process.poll() is None and not set(training.glob("states/*/state.json")) - before:
        time.sleep(0.02)


@pytest.mark.slow
def test_bad_input_on_several_ranks_is_one_sentence_and_ends_all(home: Path) -> None:
    began = time.monotonic()
    done = run(home, torchrun(2, *command(home, "bad", 1, "--set", "logs.lambda_preference=1")))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "lambda_preference" in said[0]
    assert time.monotonic() - began < 120
    listed = run(home, torchrun(2, "-m", "nano_rl", "checkpoints", "list"))
    assert listed.returncode == 0, listed.stderr
    assert "only `train` uses the others" in listed.stderr


@pytest.mark.slow
def test_one_process_imports_neither_fsdp_nor_the_ranks_nor_ray() -> None:
    code = (
        "import sys, nano_rl.train, nano_rl.commands.train, nano_rl.training_record, nano_rl.command_setup\n"
        "bad = ('torch.distributed.fsdp', 'torch.distributed.checkpoint', 'nano_cluster', 'ray')\n"
        "sys.exit(' '.join(m for m in sys.modules if m in bad) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
