"""Going on: bit for bit with what would have been, and refused in a sentence with anything else."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from looping import CONFIG, TASKS, Loop, logged_groups, parity, same, tiny_model
from looping import weights as weights_of

from nano_coder.models.opening import open_weights
from nano_rl import train as loop_module
from nano_rl.gather.step_groups import Sources
from nano_rl.learn.config import GuardConfig, OptimizerConfig
from nano_rl.learn.metrics import MEASURED, read_metrics
from nano_rl.resume import States, save_best, usual_save_every
from nano_rl.training_record import read_used
from nano_shared.errors import CheckpointError, UsageError
from nano_shared.store import LogStore

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


class Killed(BaseException):
    """Stands for a process that is gone: nothing in the loop catches it."""


def test_ac_38_a_training_killed_in_any_step_ends_as_if_it_had_not_been(tiny: Path, tmp_path: Path) -> None:
    whole = Loop(tiny, tmp_path / "whole")
    expected = whole.go(refill=1)
    broken = Loop(tiny, tmp_path / "broken")

    def die(at: int):
        runs = iter(range(at))

        def on_run(*_: object) -> None:
            if next(runs, None) is None:
                raise Killed

        return on_run

    for runs_survived in (1, 5, 6):
        with pytest.raises(Killed):
            broken.go(refill=1, on_run=die(runs_survived))
    assert same(broken.go(refill=1), expected)
    tasks = [
        [[g["task"] for g in line["groups"]] for line in read_used(loop.folder / "used.jsonl")]
        for loop in (whole, broken)
    ]
    assert tasks[0] == tasks[1]
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith(MEASURED)}
            for row in read_metrics(loop.folder / "metrics.jsonl")
        ]
        for loop in (whole, broken)
    ]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[1]] == [0, 1, 2]
    assert len(whole.used) == len(broken.used) == len(set(broken.used))


@pytest.mark.slow
def test_ac_38_sigkill_at_random_moments_and_in_the_middle_of_a_save() -> None:
    kills(2, 3)


@pytest.mark.slow
def test_ac_38_sigkill_at_many_random_moments() -> None:
    kills(24, 6)


def kills(number: int, steps: int) -> None:
    script = ROOT / "integration" / "kill_and_resume.py"
    done = subprocess.run(
        [sys.executable, str(script), "--kills", str(number), "--steps", str(steps), "--seed", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{number} kills" in done.stdout


def test_random_numbers_go_on_where_they_were(tiny: Path, tmp_path: Path) -> None:
    def draws(folder: Path, *stops: int) -> list[tuple[float, float]]:
        seen: list[tuple[float, float]] = []

        def score(run: object) -> float:
            seen.append((random.random(), torch.rand(()).item()))
            return parity(run)  # type: ignore[arg-type]

        for number, steps in enumerate(stops):
            random.seed()  # another process would not know them either
            torch.seed()
            Loop(tiny, folder).go(score=score, steps=steps, resume=number > 0)
        return seen

    assert draws(tmp_path / "a", 2) == draws(tmp_path / "b", 1, 2)


def test_a_log_that_grew_leaves_the_training_as_it_was(tiny: Path, tmp_path: Path) -> None:
    groups = logged_groups(tiny, tmp_path / "log.db")
    grown = (*groups[1:], logged_groups(tiny, tmp_path / "more.db")[0], groups[0])
    expected = Loop(tiny, tmp_path / "a").go(sources=Sources(logged=groups), group_size=0, score=None)
    loop = Loop(tiny, tmp_path / "b")
    loop.go(sources=Sources(logged=groups), group_size=0, score=None, steps=1)
    again = loop.go(sources=Sources(logged=grown), group_size=0, score=None, resume=True)
    assert same(again, expected)
    with pytest.raises(CheckpointError, match="of which the log admits 2 no longer"):
        loop.go(sources=Sources(logged=groups[:1]), group_size=0, score=None, resume=True)


def test_what_differs_is_named(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path)
    with pytest.raises(UsageError, match="nothing to resume: no state is saved under this --name"):
        loop.go(resume=True)
    loop.go(steps=1)
    for changed, resume, sentence in (
        ({"temperature": 0.9}, True, "temperature was 1.0 and is 0.9; give the same"),
        ({"optimizer": OptimizerConfig(learning_rate=1e-4)}, True, r"optimizer.learning_rate was 0.001 and"),
        ({"steps": 2}, False, "steps was 1 and is 2; --resume accepts that, or start anew"),
        ({"steps": 2, "seed": 4}, False, "steps was 1 and is 2, seed was 0 and is 4; give the same"),
    ):
        with pytest.raises(CheckpointError, match=sentence) as refused:
            loop.go(**{"steps": 1, "resume": resume} | changed)
        assert refused.value.exit_code == 2
    with pytest.raises(CheckpointError, match="began with other tasks"):
        loop.go(steps=1, sources=Sources(tasks=TASKS[:3]))
    other = tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="began from other weights than tiny; give the same --model"):
        Loop(other, tmp_path).go(steps=1)
    guards = GuardConfig(patience=7)
    assert same(loop.go(steps=1), loop.go(steps=1, resume=True, guards=guards, save_every=5))


def test_another_version_of_nano_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tiny, tmp_path)
    loop.go(steps=1)
    monkeypatch.setattr(loop_module, "runtime_version", "9.9")
    with pytest.raises(CheckpointError, match=r"saved by nano .*, and this is 9\.9, whose steps may differ"):
        loop.go(steps=1)


@pytest.mark.slow
def test_the_last_states_are_kept_and_the_best(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path)
    rewards = iter([0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1])
    loop.go(steps=5, score=lambda _: float(next(rewards)))
    states = States(tmp_path / "states")
    # the weights after one step earned everything in the step that followed
    assert states.steps() == [1, 4, 5]
    assert states.read(5)[1]["best"] == {"step": 1, "level": 0.0, "reward": 1.0}


@pytest.mark.slow
def test_a_checkpoint_of_the_best_state(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path / "training")
    weights: list[dict[str, torch.Tensor]] = []
    rewards = iter([0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1])
    loop.go(
        score=lambda _: float(next(rewards)), name=str(tiny),
        on_step=lambda *_: weights.append(weights_of(loop.model)),
    )  # fmt: skip
    target = tmp_path / "checkpoints" / "best"
    with LogStore.open(loop.folder / "log.db") as store:
        manifest = save_best(loop.folder, target, store)
    assert (manifest.policy_version, manifest.metrics) == (1, {"reward_mean": 1.0})
    assert manifest.trained_on.run_ids == tuple(sorted(loop.used[:4]))
    assert same(weights_of(open_weights(str(target)).loaded.model), weights[0])
    with (
        LogStore.open(tmp_path / "none.db") as store,
        pytest.raises(CheckpointError, match="no training has saved a state"),
    ):
        save_best(tmp_path / "none", tmp_path / "two", store)


@pytest.mark.slow
def test_a_damaged_state_is_named_and_the_one_before_it_serves(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path)
    expected = loop.go()
    newest = tmp_path / "states" / "00000003"
    file = newest / "training.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(
        CheckpointError, match=r"00000003: training.safetensors is missing or corrupt; delete"
    ):
        loop.go()
    shutil.rmtree(newest)
    assert same(loop.go(), expected)


def test_a_state_of_a_newer_nano_and_one_without_sense(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path)
    loop.go(steps=1)
    manifest = tmp_path / "states" / "00000001" / "state.json"
    told = json.loads(manifest.read_text())
    for text, sentence in (
        (json.dumps(told | {"version": 2}), "or of a newer nano: version: "),
        (json.dumps(told | {"step": -1}), "state.json is damaged, .*: step: "),
        ("{", "state.json is damaged"),
    ):
        manifest.write_text(text)
        with pytest.raises(CheckpointError, match=sentence):
            loop.go(steps=1)


def test_one_process_at_a_time(tiny: Path, tmp_path: Path) -> None:
    with (
        States(tmp_path / "states").claimed(),
        pytest.raises(CheckpointError, match="being trained by another process"),
    ):
        Loop(tiny, tmp_path).go()


def test_runs_that_were_learned_from_must_be_on_record(tiny: Path, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path)
    loop.go(steps=2)
    used = tmp_path / "used.jsonl"
    used.write_text(used.read_text().splitlines(keepends=True)[0])
    with pytest.raises(CheckpointError, match="does not hold the runs of the 2 steps"):
        loop.go(steps=2)


@pytest.mark.parametrize(("trained", "steps"), [(135e6, 1), (42e6, 1), (1.54e9, 9)])
def test_large_states_are_saved_less_often(trained: float, steps: int) -> None:
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(torch.empty(int(trained), device="meta"))
    model.frozen = torch.nn.Parameter(torch.empty(10**11, device="meta"), requires_grad=False)
    assert usual_save_every(model) == steps


@pytest.mark.slow
def test_a_training_whose_states_are_large_ends_as_any_other(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Loop(tiny, tmp_path / "often").go()
    monkeypatch.setattr(loop_module, "usual_save_every", lambda model: 2)
    seldom = Loop(tiny, tmp_path / "seldom")
    assert same(seldom.go(save_every=None), expected)
    assert States(seldom.folder / "states").steps() == [2, 3]


def test_settings_are_compared_where_they_decide(tiny: Path) -> None:
    from nano_rl.resume import Identity, difference

    def identity(**changed: object) -> Identity:
        config = CONFIG.model_copy(update=changed).model_dump(mode="json")
        return Identity(
            code_version="1", model="m", model_name="m", profile_hash="p", template_hash="t", tasks="x",
            config=config,
        )  # fmt: skip

    decaying = OptimizerConfig(schedule="cosine")
    saved = identity(optimizer=decaying)
    assert difference(saved, identity(optimizer=decaying, save_every=9), resume=True) is None
    told = difference(saved, identity(optimizer=decaying, steps=9), resume=True)
    assert told is not None
    assert "steps was 3 and is 9; give the same" in told  # the rate of the steps done depends on it
