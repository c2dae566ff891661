"""Deep verification certifies a run by the weights that it names, and says where they are not at hand."""

from __future__ import annotations

import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from executions import SUBMIT, a_runtime, a_task, act
from typer.testing import CliRunner

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.commands.log import command
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.verify.tokens import MAX_GAP, MEAN_GAP, Scored, gap_of
from nano_shared.errors import NanoError, UsageError
from nano_shared.store import LogStore
from nano_shared.types import Sampling, Trajectory

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and a log of what the first sampled in float32 and in bfloat16."""
    folder = tmp_path_factory.mktemp("deep")
    task = a_task(check="true")
    texts = [m.content for m in first_messages(COMPACT_1, task, ("a.py",))] + [
        SUBMIT,
        act("shell", command="ls"),
    ]
    for name, seed in (("one", 0), ("two", 1)):
        build_tiny(folder / name, texts, hidden=64, layers=2, max_positions=512, seed=seed)
    for dtype, seed in (("float32", 3), ("bfloat16", 4)):
        opened = open_weights(str(folder / "one"), dtype=dtype)
        runtime = a_runtime(
            folder, policy=local_policy(opened.loaded, opened.profile), policy_name=str(folder / "one"),
            sampling=Sampling(max_tokens=16),
        )  # fmt: skip
        grade_run(run_task(task, runtime, seed=seed), runtime)
    return folder


def runs(home: Path) -> list[Trajectory]:
    with LogStore.open(home / "log.db") as store:
        return list(store.trajectories())


def copied(home: Path, tmp_path: Path, run: Trajectory, **changes: Any) -> str:
    """The log of one run, changed."""
    log = tmp_path / "log.db"
    with LogStore.open(log, blobs=home / "blobs") as store:
        store.append(run.model_copy(update=changes))
    return str(log)


def verified(log: str | Path, run: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(
        command, ["verify", run, "--log", str(log), "--deep", "--json", *options], standalone_mode=False
    )
    if done.exception is not None:
        raise done.exception
    return int(done.return_value), json.loads(done.stdout)["deep"]


def test_what_was_sampled_in_float32_is_certified_token_for_token(home: Path) -> None:
    run = runs(home)[0]
    code, deep = verified(home / "log.db", run.id)
    assert (code, deep["certified"], deep["dtype"]) == (0, True, "float32")
    assert deep["difference"]["max"] <= MAX_GAP == deep["bounds"]["max"]
    assert deep["difference"]["tokens"] == run.num_sampled_tokens


def test_what_was_sampled_in_bfloat16_is_certified_in_the_mean(home: Path) -> None:
    run = runs(home)[1]
    code, deep = verified(home / "log.db", run.id)
    assert (code, deep["certified"], deep["dtype"]) == (0, True, "bfloat16")
    assert deep["difference"]["relative_mean"] <= MEAN_GAP == deep["bounds"]["relative_mean"]


def test_an_invented_logprob_is_not_certified(home: Path, tmp_path: Path) -> None:
    run = runs(home)[0]
    last = run.turns[-1]
    tokens = last.completion.tokens
    assert tokens is not None
    invented = tokens.model_copy(update={"logprobs": (-0.01,) * len(tokens.logprobs)})
    turn = last.model_copy(update={"completion": last.completion.model_copy(update={"tokens": invented})})
    log = copied(home, tmp_path, run, turns=(*run.turns[:-1], turn))
    code, deep = verified(log, run.id)
    assert (code, deep["certified"]) == (1, False)
    assert [finding["kind"] for finding in deep["damage"]] == ["log-probs of another policy"]
    assert deep["difference"]["worst_turn"] == last.index


def test_a_nan_is_named_though_the_run_cannot_be_loaded(home: Path, tmp_path: Path) -> None:
    run = runs(home)[0]
    log = copied(home, tmp_path, run)
    nan = struct.pack("<d", float("nan"))
    with closing(sqlite3.connect(log)) as connection:
        connection.execute("UPDATE log_turns SET logprobs = CAST(? || substr(logprobs, 9) AS BLOB)", (nan,))
        connection.commit()
    code, deep = verified(log, run.id)
    assert (code, [finding["kind"] for finding in deep["damage"]]) == (1, ["log-prob not finite"])


@pytest.mark.parametrize(
    ("changes", "model", "reason"),
    [
        ({"policy": "gone"}, None, "not at hand .*unknown model 'gone'"),
        ({}, "two", "not at hand: .*two holds the weights"),
    ],
)
def test_a_policy_that_is_not_at_hand_is_bad_input(
    home: Path, tmp_path: Path, changes: dict[str, Any], model: str | None, reason: str
) -> None:
    run = runs(home)[0]
    log = copied(home, tmp_path, run, **changes)
    options = ["--model", str(home / model)] if model else []
    with pytest.raises(NanoError, match=reason) as caught:
        verified(log, run.id, *options)
    assert caught.value.exit_code == 2


def test_a_policy_that_moved_is_named_with_model(home: Path, tmp_path: Path) -> None:
    run = runs(home)[0]
    log = copied(home, tmp_path, run, policy="gone")
    assert verified(log, run.id, "--model", str(home / "one"))[0] == 0


def test_weights_of_a_trainings_middle_are_not_at_hand(home: Path, tmp_path: Path) -> None:
    run = runs(home)[0]
    turns = tuple(
        t.model_copy(update={"completion": t.completion.model_copy(update={"policy_version": 7})})
        for t in run.turns
    )
    with pytest.raises(UsageError, match="7 optimizer steps in"):
        verified(copied(home, tmp_path, run, turns=turns), run.id)


def test_a_text_only_run_is_not_certified_and_needs_no_weights(tmp_path: Path) -> None:
    runtime: Runtime = a_runtime(tmp_path, [SUBMIT], tokens=False)
    run = grade_run(run_task(a_task(check="true"), runtime), runtime)
    code, deep = verified(tmp_path / "log.db", run.id)
    assert (code, deep["damage"][0]["kind"], deep["difference"]) == (1, "text-only", None)


def test_model_without_deep_is_refused(home: Path) -> None:
    done = CliRunner().invoke(
        command, ["verify", "last", "--log", str(home / "log.db"), "--model", "x"], standalone_mode=False
    )
    assert isinstance(done.exception, UsageError)


def test_every_run_of_a_log_is_looked_at_and_summed_up(home: Path, tmp_path: Path) -> None:
    good, rounded = runs(home)
    log = Path(copied(home, tmp_path, good))
    with LogStore.open(log, blobs=home / "blobs") as store:
        store.append(rounded.model_copy(update={"policy": "gone"}))
        store.append(good.model_copy(update={"id": "torn", "seed": 9, "template_hash": "sha256:other"}))

    def verify(*arguments: str) -> tuple[int, list[str]]:
        command_line = ["verify", *arguments, "--log", str(log)]
        done = CliRunner().invoke(command, command_line, standalone_mode=False)
        assert done.exception is None, done.exception
        return int(done.return_value), done.stdout.splitlines()

    code, lines = verify("--deep")
    by_run = dict(line.split("  ", 1) for line in lines[:-1])
    assert by_run[good.id].startswith("certified, ")
    assert by_run[rounded.id].startswith("unknown: the policy of run")
    assert "not certified; it was made under another chat template" in by_run["torn"]
    counted = lines[-1].removeprefix("3 runs: ").split(", ")
    assert sorted(counted) == ["1 certified", "1 not certified", "1 whose policy is not at hand"]
    assert code == 1
    assert verify(good.id, rounded.id, "--deep")[0] == 2
    assert verify(good.id, rounded.id)[1][-1] == "2 runs: 2 may train"
    told = [json.loads(line) for line in verify("--deep", "--json")[1]]
    assert {row["run"]: row["deep"]["certified"] for row in told} == {
        good.id: True, rounded.id: None, "torn": False,
    }  # fmt: skip


def test_the_report_for_people_says_how_far_they_are(home: Path) -> None:
    done = CliRunner().invoke(
        command, ["verify", runs(home)[0].id, "--log", str(home / "log.db"), "--deep"], standalone_mode=False
    )
    assert "certified by" in done.stdout
    assert "recomputed in float32" in done.stdout


def test_the_worst_turn_does_not_hide_in_a_long_run() -> None:
    honest = [Scored(turn=0, recorded=-1.0, recomputed=-1.0)] * 1000
    gap = gap_of([*honest, *[Scored(turn=1, recorded=-0.1, recomputed=-2.1)] * 5])
    assert (gap.worst_turn, gap.tokens) == (1, 1005)
    assert gap.mean < MEAN_GAP
    assert not gap.close


def test_rounding_may_grow_with_the_number_that_is_rounded() -> None:
    """In bfloat16 a chat that the policy finds unlikely is not another policy's."""
    unlikely = gap_of([Scored(turn=0, recorded=-4.0, recomputed=-3.85)] * 16)
    assert (unlikely.close, unlikely.mean) == (True, pytest.approx(0.15))
    assert not gap_of([Scored(turn=0, recorded=-0.5, recomputed=-0.35)] * 16).close


def test_not_a_number_is_neither_exact_nor_close() -> None:
    gap = gap_of([Scored(turn=0, recorded=-1.0, recomputed=float("nan"))])
    assert not gap.exact
    assert not gap.close
