"""Replay: a logged run is looked at, executed again with every drift named, and fed again token by token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.cli import cli
from nano_coder.models.opening import open_policy, open_renderer
from nano_coder.models.replayed import ReplayedPolicy
from nano_coder.run.execution import Runtime, run_task
from nano_coder.run.replay import execute, refeed
from nano_coder.run.replay_differences import Cause, cause_of
from nano_shared.command_line import run_command
from nano_shared.errors import PolicyError, UsageError
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Sampling, StopReason, Task, Trajectory

WORK = (
    act("write_file", path="b.py", content="two\n"),
    act("read_file", path="b.py"),
    "no action at all",
    act("shell", command="seq 1 4000"),
    act("shell", command="tail -c 20 .nano/output_3.txt; cat b.py"),
    SUBMIT,
)


def a_run(folder: Path, texts: Any = WORK, **options: Any) -> tuple[Trajectory, Runtime]:
    """A run and its runtime, read back from the log as any replay gets it."""
    runtime = a_runtime(folder, texts, **options)
    run = run_task(a_task(limits=limits()), runtime, seed=1)
    return runtime.store.get(run.id), runtime


def command(capsys: pytest.CaptureFixture[str], log: Path, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run_command(cli, ["replay", *arguments, "--log", str(log)])
    streams = capsys.readouterr()
    return int(end.value.code or 0), streams.out, streams.err


# ---------------------------------------------------------------------------------------- execute


def test_the_actions_of_a_run_give_again_what_they_gave(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    result = execute(run, runtime.sandbox, runtime.store.blobs)
    assert result.drifts == ()
    assert result.actions == 5
    assert sorted(path for path in tmp_path.rglob("*")) == before  # the log is only read


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        (act("shell", command="date +%s%N"), Cause.TIME),
        (act("python", code="import uuid; print(uuid.uuid4().hex)"), Cause.RANDOMNESS),
        (act("shell", command="od -An -N8 -tx1 /dev/urandom > noise"), Cause.RANDOMNESS),
        (act("python", code="import time; print(repr(time.perf_counter()))"), Cause.TIME),
    ],
)
def test_drift_by_time_and_randomness_is_named_and_expected(
    tmp_path: Path, action: str, cause: Cause
) -> None:
    run, runtime = a_run(tmp_path, [action, SUBMIT])
    result = execute(run, runtime.sandbox, runtime.store.blobs)
    assert [drift.cause for drift in result.drifts] == [cause]
    assert result.holds


def test_a_call_that_runs_out_of_time_only_once_drifted_by_time(tmp_path: Path) -> None:
    late = a_task(limits=limits(tool_seconds=5.0))
    runtime = a_runtime(tmp_path, [act("shell", command="echo begun; sleep 60"), SUBMIT])
    run = run_task(late, runtime, seed=1)
    assert run.turns[0].observations[0].timed_out
    quick = run.turns[0].calls[0].model_copy(update={"arguments": {"command": "echo begun; sleep 0"}})
    turn = run.turns[0].model_copy(update={"calls": (quick,)})
    run = run.model_copy(update={"turns": (turn, *run.turns[1:])})
    result = execute(run, runtime.sandbox, runtime.store.blobs)
    assert {drift.cause for drift in result.drifts} == {Cause.TIME}
    assert result.holds


def with_output(run: Trajectory, text: str) -> Trajectory:
    """The run as if its first action had shown something else."""
    turn = run.turns[0]
    told = turn.observations[0].model_copy(update={"text": text})
    return run.model_copy(
        update={"turns": (turn.model_copy(update={"observations": (told,)}), *run.turns[1:])}
    )


def test_what_neither_clock_nor_chance_explains_is_other(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path, [act("shell", command="echo new behaviour"), SUBMIT])
    result = execute(with_output(run, "old behaviour"), runtime.sandbox, runtime.store.blobs)
    assert [(d.cause, d.what, d.turn) for d in result.drifts] == [(Cause.OTHER, "text", 0)]
    assert not result.holds


def test_a_run_without_a_workspace_cannot_be_executed(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path, [SUBMIT])
    with pytest.raises(UsageError, match="no snapshot of its start"):
        execute(run.model_copy(update={"snapshot": None}), runtime.sandbox, runtime.store.blobs)


@pytest.mark.parametrize(
    ("logged", "now", "cause"),
    [
        ("1 passed in 0.03s", "1 passed in 1.20s", Cause.TIME),
        ("-rw-r--r-- 1 root root 3 Nov 21 22:01 a", "-rw-r--r-- 1 root root 3 Dec  1 07:44 a", Cause.TIME),
        ("2026-11-21T22:00:01.5Z ok", "2027-01-02T03:04:05Z ok", Cause.TIME),
        ("<f at 0x7f0a12345678>", "<f at 0x7f0b87654321>", Cause.PLACE),
        ("opened /tmp/tmpab12cd34/x", "opened /tmp/tmpzz99yy88/x", Cause.PLACE),
        ("pid 17 ended", "pid 4242 ended", Cause.PLACE),
        ("3 passed", "2 passed", Cause.OTHER),
    ],
)
def test_causes_that_the_texts_show(logged: str, now: str, cause: Cause) -> None:
    assert cause_of(logged, [now, now], "{}") is cause


@settings(deadline=None)
@given(st.text(), st.text())
def test_equal_executions_of_today_never_count_as_chance(logged: str, now: str) -> None:
    assert cause_of(logged, [now, now, now], "") is not Cause.RANDOMNESS


# ----------------------------------------------------------------------------------------- refeed


def test_the_prompts_of_a_run_are_proved_token_by_token(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path)
    result = refeed(run, open_renderer(run), runtime.store.blobs)
    assert result.holds
    assert result.proved == len(run.turns) == 6
    assert sum(prompt.tokens for prompt in result.prompts) > 0


def changed(run: Trajectory, turn: int, place: int) -> Trajectory:
    """The run with one token of a prompt replaced in the log."""
    completion = run.turns[turn].completion
    assert completion.tokens is not None
    ids = list(completion.tokens.context_ids)
    ids[place] ^= 1
    tokens = completion.tokens.model_copy(update={"context_ids": tuple(ids)})
    damaged = run.turns[turn].model_copy(
        update={"completion": completion.model_copy(update={"tokens": tokens})}
    )
    return run.model_copy(update={"turns": (*run.turns[:turn], damaged, *run.turns[turn + 1 :])})


@settings(deadline=None)
@given(turn=st.integers(0, 5), place=st.integers(0, 9))
def test_the_first_token_that_differs_is_named(
    turn: int, place: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run, runtime = shared_run(tmp_path_factory)
    result = refeed(changed(run, turn, place), open_renderer(run), runtime.store.blobs)
    first = result.first_difference
    assert first is not None
    assert (first.turn, first.differs_at) == (turn, place)
    assert first.logged == (first.rendered or 0) ^ 1
    assert not result.holds


_shared: list[tuple[Trajectory, Runtime]] = []


def shared_run(factory: pytest.TempPathFactory) -> tuple[Trajectory, Runtime]:
    if not _shared:
        _shared.append(a_run(factory.mktemp("shared")))
    return _shared[0]


def test_a_killed_run_is_proved_as_far_as_it_got(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path)
    killed = run.model_copy(update={"turns": run.turns[:2], "stop": None, "ended": None})
    result = refeed(killed, open_renderer(run), runtime.store.blobs)
    assert result.holds
    assert result.proved == 2
    assert any("never ended" in note for note in result.notes)
    assert execute(killed, runtime.sandbox, runtime.store.blobs).drifts == ()


def test_a_text_only_run_says_what_cannot_be_proved(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path, tokens=False)
    result = refeed(run, open_renderer(run), runtime.store.blobs)
    assert result.holds
    assert result.proved == 0
    assert {prompt.not_compared for prompt in result.prompts} == {
        "text-only: the log has no tokens of this turn"
    }


def test_a_rewritten_history_is_said_to_be_unproved_and_what_follows_it_is_proved(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path)
    turns = []
    for turn in run.turns:
        tokens = turn.completion.tokens
        assert tokens is not None
        if turn.index >= 3:  # from here on as if a compaction had left its own summary
            context = tuple(b"user: in short") if turn.index == 3 else tokens.context_ids
            tokens = tokens.model_copy(update={"row": 1, "context_ids": context})
        completion = turn.completion.model_copy(update={"tokens": tokens})
        turns.append(turn.model_copy(update={"completion": completion}))
    result = refeed(run.model_copy(update={"turns": tuple(turns)}), open_renderer(run), runtime.store.blobs)
    assert result.holds
    assert [prompt.identical for prompt in result.prompts] == [True, True, True, False, True, True]
    assert "rewritten history" in str(result.prompts[3].not_compared)


def test_a_text_that_is_read_as_other_calls_is_a_difference(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path)
    forged = run.turns[0].model_copy(update={"calls": run.turns[1].calls})
    run = run.model_copy(update={"turns": (forged, *run.turns[1:])})
    result = refeed(run, open_renderer(run), runtime.store.blobs)
    assert [found.turn for found in result.differences] == [0]
    assert not result.holds


def test_a_local_policy_is_proved_with_its_tokenizer_alone(
    tmp_path: Path, tiny_folder: Path, one_thread: None
) -> None:
    opened = open_policy(str(tiny_folder), dtype="float32")
    runtime = replace(
        a_runtime(tmp_path),
        policy=opened.policy,
        policy_name=opened.name,
        sampling=Sampling(temperature=1.0, max_tokens=8),
    )
    run = run_task(a_task(limits=limits(max_turns=3)), runtime, seed=1)
    result = refeed(runtime.store.get(run.id), open_renderer(run), runtime.store.blobs)
    assert result.holds
    assert result.proved == len(run.turns) > 1


def test_a_replayed_policy_has_no_more_than_its_run(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path, [SUBMIT])
    policy = ReplayedPolicy(run, None)
    assert policy.complete(Conversation(), Sampling()) == run.turns[0].completion
    with pytest.raises(PolicyError, match="all of them are replayed"):
        policy.complete(Conversation(), Sampling())


# ------------------------------------------------------------------------------------ command line


def test_view_shows_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = a_run(tmp_path)
    code, out, _ = command(capsys, tmp_path / "log.db", run.id, "--view")
    assert code == 0
    assert "fix it" in out
    assert all(f"step {n} of 6" in out for n in range(1, 7))
    code, out, _ = command(capsys, tmp_path / "log.db", run.id, "--view", "--step", "2")
    assert "step 2 of 6" in out
    assert "step 1 of 6" not in out
    code, out, _ = command(capsys, tmp_path / "log.db", run.id, "--view", "--step", "2", "--json")
    assert json.loads(out)["runs"][0]["steps"][0]["index"] == 1


def test_the_command_replays_every_run_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, runtime = a_run(tmp_path, [act("shell", command="echo now"), SUBMIT])
    code, out, _ = command(capsys, tmp_path / "log.db", "--all", "--refeed", "--json")
    assert code == 0
    assert json.loads(out)["runs"][0]["proved"] == 2
    runtime.store.append(with_output(run, "then").model_copy(update={"id": "drifted"}))
    code, out, _ = command(capsys, tmp_path / "log.db", "--all", "--execute")
    assert code == 1
    assert "other: 'then' -> 'now'" in out
    runtime.store.append(changed(run, 1, 0).model_copy(update={"id": "damaged"}))
    code, out, _ = command(capsys, tmp_path / "log.db", "damaged", "--refeed")
    assert code == 1
    assert "step 2 differs at token 0 of its prompt" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nosuch", "--view"), "no run 'nosuch'"),
        (("last",), "--view, --execute or --refeed"),
        (("--refeed",), "name the runs"),
        (("last", "--all", "--refeed"), "not both"),
        (("last", "--view", "--step", "9"), "no step 9"),
        (("last", "--refeed", "--step", "1"), "--step belongs to --view"),
        (("last", "--execute", "--model", "m"), "--model belongs to --refeed"),
        (("last", "--view", "--execute"), "give one of them"),
    ],
)
def test_bad_input_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    a_run(tmp_path, [SUBMIT])
    code, out, err = command(capsys, tmp_path / "log.db", *arguments)
    assert code == 2
    assert says in err
    assert out == ""


def test_a_model_that_is_not_at_hand_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, runtime = a_run(tmp_path, [SUBMIT])
    gone = {"id": "gone", "policy": "gone-model", "template_hash": "sha256:other"}
    runtime.store.append(run.model_copy(update=gone))
    code, _, err = command(capsys, tmp_path / "log.db", "gone", "--refeed")
    assert code == 2
    assert "not at hand" in err
    code, out, _ = command(capsys, tmp_path / "log.db", "--all", "--refeed", "--json")
    assert code == 2
    assert list(json.loads(out)["refused"]) == ["gone"]
    assert json.loads(out)["runs"][0]["holds"]
    assert run.stop is StopReason.FINISHED
    assert isinstance(run.task, Task)
    assert LogStore.open(tmp_path / "log.db").get("gone").policy == "gone-model"
