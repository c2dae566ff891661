"""Feedback by the command line: every row finds its run, step, span and tokens, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.cli import cli
from nano_logs.feedback import load_decode, token_range, token_ranges
from nano_shared.command_line import run_command
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
)

TEXTS = ("look first\n@shell\nls", "naïve 測試 done")
Nano = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Nano:
    """Runs a command line: its exit code, stdout and stderr."""
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NANO_LOG", raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run_command(cli, [str(a) for a in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    return LogStore.open(tmp_path / "home" / "log.db")


def a_run(folder: Path, name: str, *, key: str = "task-0", texts: tuple[str, ...] = TEXTS) -> Trajectory:
    """A logged run with the tokens of the tokenizer in `folder`, each turn ended by its end-of-turn token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    turns = []
    for index, text in enumerate(texts):
        sampled = (*tokenizer.encode(text, add_special_tokens=False).ids, 2)
        tokens = TurnTokens(context_ids=(1,), sampled_ids=sampled, logprobs=(-1.0,) * len(sampled))
        completion = Completion(
            text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="tiny"
        )
        turns.append(Turn(index=index, completion=completion, parser="compact", started=0, ended=0))
    return Trajectory(
        id=name, task=Task(key=key, prompt="Do it."), turns=tuple(turns), stop=StopReason.FINISHED,
        runtime_version="0", profile=COMPACT_1.name, profile_hash=COMPACT_1.hash, template_hash="t",
        tools_hash="h", policy=str(folder), started=0.0,
    )  # fmt: skip


@pytest.fixture
def runs(store: LogStore, tiny_folder: Path) -> LogStore:
    for name, key in (("run-a", "task-0"), ("run-b", "task-0"), ("run-c", "task-1")):
        store.append(a_run(tiny_folder, name, key=key))
    return store


# ---------------------------------------------------------------------------------------- what works


def test_all_that_is_said_at_once_is_a_row_each(nano: Nano, runs: LogStore) -> None:
    assert (
        nano("feedback", "run-a", "--good", "--note", "clean", "--prefer", "run-b", "--author", "me")[0] == 0
    )
    rows = runs.feedback("run-a")
    assert [(r.kind, r.value, r.text) for r in rows] == [
        ("thumb", 1.0, None), ("note", None, "clean"), ("prefer", None, "run-b"),
    ]  # fmt: skip
    assert {r.author for r in rows} == {"me"}
    assert nano("feedback", "run-c", "--note", "bytes \udcff that are no text", "--json")[0] == 0
    assert runs.feedback("run-c")[0].text == "bytes \udcff that are no text"
    nano("feedback", "run-b", "--outcome", "reverted")
    nano("feedback", "run-b", "--outcome", "tests_passed")
    assert [(r.text, r.value) for r in runs.feedback("run-b")] == [("reverted", 0.0), ("tests_passed", 1.0)]


def test_a_span_of_a_step_is_tied_to_the_tokens_that_wrote_it(nano: Nano, runs: LogStore) -> None:
    code, out, err = nano("feedback", "run-a", "--step", 2, "--span", "6:8", "--bad", "--json")
    assert (code, err) == (0, "")
    (line,) = map(json.loads, out.splitlines())
    assert (line["run"], line["task"], line["step"], line["turn"], line["span"]) == (
        "run-a",
        "task-0",
        2,
        1,
        [6, 8],
    )
    ((where),) = line["tokens"]
    decode = load_decode(runs.get("run-a").policy)
    assert decode is not None
    ids = runs.get("run-a").turns[1].completion.tokens.sampled_ids  # type: ignore[union-attr]
    assert decode(ids[where["start"] : where["end"]]).strip() == "測試"


def test_the_list_is_json_lines_with_the_tokens_of_runs_steps_and_spans(nano: Nano, runs: LogStore) -> None:
    nano("feedback", "run-b", "--good")
    nano("feedback", "run-a", "--step", 1, "--bad")
    code, out, _ = nano("feedback", "--list", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    whole = [len(t.completion.tokens.sampled_ids) for t in runs.get("run-b").turns]  # type: ignore[union-attr]
    assert code == 0
    assert [line["run"] for line in lines] == ["run-b", "run-a"]
    assert lines[0]["tokens"] == [{"turn": i, "start": 0, "end": n} for i, n in enumerate(whole)]
    assert lines[1]["tokens"] == [{"turn": 0, "start": 0, "end": whole[0]}]
    assert [json.loads(x)["run"] for x in nano("feedback", "run-a", "--list", "--json")[1].splitlines()] == [
        "run-a"
    ]
    assert "thumb" in nano("feedback", "--list")[1]


def test_an_edit_is_read_from_standard_input(
    nano: Nano, runs: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    code, _, err = nano("feedback", "run-a", "--step", 1, "--edit", "-")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "not UTF-8" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"think first")))
    assert nano("feedback", "run-a", "--step", 1, "--span", "0:10", "--edit", "-")[0] == 0
    (row,) = runs.feedback("run-a")
    assert (row.kind, row.text, row.turn, row.span) == ("edit", "think first", 0, (0, 10))


def test_a_run_without_tokens_is_said_of_and_has_none(nano: Nano, runs: LogStore, tiny_folder: Path) -> None:
    run = a_run(tiny_folder, "run-t")
    bare = [
        t.model_copy(update={"completion": t.completion.model_copy(update={"tokens": None})})
        for t in run.turns
    ]
    runs.append(run.model_copy(update={"turns": tuple(bare)}))
    (line,) = nano("feedback", "run-t", "--step", 1, "--bad", "--json")[1].splitlines()
    assert json.loads(line)["tokens"] is None


def test_feedback_pages_through_a_long_log(runs: LogStore) -> None:
    for number in range(7):
        runs.add_feedback("run-a", Feedback(kind=FeedbackKind.NOTE, text=str(number), created=1.0))
    assert [s.feedback.text for s in runs.all_feedback(page=3)] == [str(n) for n in range(7)]
    assert [s.run for s in runs.all_feedback(run="run-b")] == []


# --------------------------------------------------------------------------------------- what is refused


@pytest.mark.some(8)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run-a", "--good", "--bad"), "contradict"),
        (("run-a",), "nothing is said"),
        (("--good",), "name the run"),
        (("nobody", "--good"), "no run 'nobody'"),
        (("run-a", "--step", 3, "--good"), "steps 1 to 2"),
        (("run-a", "--step", 0, "--good"), "no step 0"),
        (("run-a", "--note", "  "), "the note is empty"),
        (("run-a", "--good", "--note", ""), "the note is empty"),
        (("run-a", "--prefer", "run-a"), "itself"),
        (("run-a", "--prefer", "run-c"), "different tasks"),
        (("run-a", "--prefer", "nobody"), "no run 'nobody'"),
        (("run-a", "--good", "--prefer", "nobody"), "no run 'nobody'"),
        (("run-a", "--outcome", "merged"), "'merged' is not one of"),
        (("run-a", "--step", 1, "--outcome", "kept"), "whole runs"),
        (("run-a", "--span", "0:2", "--good"), "--step"),
        (("run-a", "--edit", "x"), "--step"),
        (("run-a", "--step", 1, "--edit", " "), "the edit is empty"),
        (("run-a", "--step", 1, "--edit", TEXTS[0]), "already"),
        (("run-a", "--step", 1, "--span", "4:4", "--good"), "START:END"),
        (("run-a", "--step", 1, "--span", "4", "--good"), "START:END"),
        (("run-a", "--step", 1, "--span", "0:900", "--good"), "ends beyond step 1"),
        (("run-a", "--list", "--good"), "--list only reads"),
        (("run-a", "--list", "--step", 1), "--list only reads"),
        (("nobody", "--list"), "no run 'nobody'"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(
    nano: Nano, runs: LogStore, arguments: tuple[object, ...], words: str
) -> None:
    code, out, err = nano("feedback", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert words in err
    assert list(runs.all_feedback()) == []


def test_a_log_that_is_not_there_is_not_made(nano: Nano, tmp_path: Path) -> None:
    code, out, err = nano("feedback", "last", "--good", "--log", tmp_path / "none.db")
    assert (code, out) == (2, "")
    assert not (tmp_path / "none.db").exists()
    assert err.startswith("error: ")


# --------------------------------------------------------------------------------------------- tokens


@settings(max_examples=30, deadline=None)
@given(data=st.data(), text=st.text(min_size=1, max_size=30))
def test_the_tokens_of_a_span_spell_it_and_no_fewer_would(
    tiny_folder: Path, data: st.DataObject, text: str
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    run = a_run(tiny_folder, "r", texts=(text,))
    decode = load_decode(str(tiny_folder))
    assert decode is not None
    tokens = run.turns[0].completion.tokens
    assert tokens is not None
    found = token_range(tokens, text, (start, end), decode)
    assert found is not None
    low, high = found
    # what comes before and after, decoded by itself, ends and begins outside of the span
    assert len(decode(tokens.sampled_ids[:low]).rstrip("\ufffd")) <= start
    assert decode(tokens.sampled_ids[:high]).startswith(text[:end])
    assert not decode(tokens.sampled_ids[: high - 1]).startswith(text[:end])
    assert not decode(tokens.sampled_ids[low + 1 :]).endswith(text[start:] + decode(tokens.sampled_ids[-1:]))


def test_tokens_of_another_vocabulary_are_not_guessed(tiny_folder: Path) -> None:
    run = a_run(tiny_folder, "r")
    said = Feedback(kind=FeedbackKind.THUMB, value=1.0, turn=0, span=(0, 4), created=0.0)
    assert token_ranges(run, said, None) is None
    assert token_ranges(run, said, lambda ids: "x" * len(ids)) is None
