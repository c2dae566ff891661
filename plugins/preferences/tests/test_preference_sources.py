"""Pairs from edits, from a judge and from a constitution: each names its source, and refusals are counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.judge_server import honest, judging
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_preferences.edit_pairs import _replaced, edit_pairs
from nano_preferences.pairs import PreferencePair, read_pairs
from nano_rl.cli import cli
from nano_shared import snapshot, snapshot_change
from nano_shared.command_line import run_command
from nano_shared.hidden_checks import AnswerChecks
from nano_shared.logged_run import Feedback, FeedbackKind, workspace_edit
from nano_shared.store import LogStore
from nano_shared.types import Task, ToolCall, Trajectory

Nano = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NANO_LOG", raising=False)
    return tmp_path / "home"


@pytest.fixture
def store(home: Path) -> Iterator[LogStore]:
    with LogStore.open() as opened:
        yield opened


@pytest.fixture
def nano(capsys: pytest.CaptureFixture[str]) -> Nano:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run_command(cli, [str(a) for a in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def act(tool: str, **arguments: str | int) -> str:
    call = ToolCall(name=tool, arguments=dict(arguments))
    return DIALECTS[COMPACT_1.dialect].render("", (call,), COMPACT_1.tools)


def executed(store: LogStore, *texts: str, key: str = "task-0") -> Trajectory:
    """A run that really happened."""
    task = Task(
        key=key, prompt="Write add.", files={"a.py": "one\ntwo\nthree\n"},
        hidden=AnswerChecks(answer="never"),
    )  # fmt: skip
    policy = ScriptedPolicy([*texts, act("submit")], tokens=True)
    return run_task(task, Runtime(policy=policy, sandbox=open_sandbox(), store=store))


def edited(store: LogStore, run: Trajectory, files: dict[str, str], folder: Path) -> Feedback:
    """The row that the question at the end of a run writes when these files are left."""
    assert run.last_snapshot is not None
    snapshot.materialise(run.last_snapshot, store.blobs, folder)
    for name, text in files.items():
        (folder / name).write_text(text)
    workspace = snapshot.snapshot_directory(folder, store.blobs, exclude=())
    diff = snapshot_change.diff(run.last_snapshot, workspace, store.blobs)
    row = Feedback(kind=FeedbackKind.EDIT, text=workspace_edit(workspace, diff), created=1.0)
    store.add_feedback(run.id, row)
    return row


def texts(pair: PreferencePair) -> tuple[str, str]:
    return pair.chosen[0].content, pair.rejected[0].content


# ---------------------------------------------------------------------------------------------- edits


def test_an_edited_file_becomes_the_action_that_would_have_written_it(
    store: LogStore, tmp_path: Path
) -> None:
    written = act("write_file", path="b.py", content="def add(a, b):\n    return a - b\n")
    run = executed(store, written)
    edited(store, run, {"b.py": "def add(a, b):\n    return a + b\n"}, tmp_path / "w")
    refused: Counter[str] = Counter()
    (pair,) = edit_pairs(store, run, refused)
    assert (pair.source, pair.task, pair.rejected_run, pair.exact) == ("edit", "task-0", run.id, None)
    assert texts(pair) == (written.replace("a - b", "a + b"), written)
    assert [m.role for m in pair.prompt] == ["system", "user"]
    assert not refused


def test_an_edit_of_one_of_several_actions_keeps_what_came_before_as_context(
    store: LogStore, tmp_path: Path
) -> None:
    run = executed(
        store, act("read_file", path="a.py"), act("edit_file", path="a.py", line=2, new="zwei"),
        act("write_file", path="c.py", content="c\n"),
    )  # fmt: skip
    edited(store, run, {"a.py": "one\ndeux\nthree\n"}, tmp_path / "w")
    (pair,) = edit_pairs(store, run, Counter())
    assert [m.role for m in pair.prompt] == ["system", "user", "assistant", "tool"]
    assert texts(pair) == (
        act("edit_file", path="a.py", line=2, new="deux"), act("edit_file", path="a.py", line=2, new="zwei"),
    )  # fmt: skip


def test_an_edit_that_no_action_holds_makes_no_pair_and_is_counted(store: LogStore, tmp_path: Path) -> None:
    run = executed(store, act("write_file", path="b.py", content="b\n"))
    edited(store, run, {"a.py": "another file\n"}, tmp_path / "w")
    refused: Counter[str] = Counter()
    assert list(edit_pairs(store, run, refused)) == []
    assert refused == {"edit: no single action of the run holds what was edited": 1}


def test_an_edit_of_a_span_of_a_step_replaces_it(store: LogStore) -> None:
    run = executed(store, "I look\n" + act("search", pattern="one"))
    row = Feedback(kind=FeedbackKind.EDIT, text="We", turn=0, span=(0, 1), created=1.0)
    store.add_feedback(run.id, row)
    (pair,) = edit_pairs(store, run, Counter())
    said = run.turns[0].completion.text
    assert texts(pair) == ("We" + said[1:], said)


@given(
    before=st.text(max_size=6),
    value=st.text(min_size=1, max_size=6),
    after=st.text(max_size=6),
    new=st.text(),
)
def test_a_replacement_gives_the_edited_file(before: str, value: str, after: str, new: str) -> None:
    old, edited = before + value + after, before + new + after
    better = _replaced(value, old, edited)
    assert better is not None
    place = old.find(value)
    places = [i for i in range(place, len(old)) if old.startswith(value, i)]
    assert edited in {old[:i] + better + old[i + len(value) :] for i in places}


# ------------------------------------------------------------------------------- judges and principles


def test_a_judge_prefers_and_the_pair_says_so(nano: Nano, store: LogStore, tmp_path: Path) -> None:
    right = executed(store, act("write_file", path="add.py", content="def add(a, b):\n    return a + b\n"))
    wrong = executed(store, act("write_file", path="add.py", content="def add(a, b):\n    return a * b\n"))
    executed(store, act("write_file", path="add.py", content="lonely\n"), key="task-1")
    with judging(honest(lambda work: float("return a + b" in work))) as judge:
        out = tmp_path / "pairs.jsonl"
        code, told, err = nano(
            "preferences", "build", "--out", out, "--from", "judge", "--judge-url", judge.url
        )
    assert code == 0, err
    assert "1 pairs (1 judge)" in told
    assert "1 (judge: no other of its task to compare with)" in err
    (pair,) = read_pairs(out)
    assert (pair.source, pair.chosen_run, pair.rejected_run) == ("judge", right.id, wrong.id)
    assert pair.exact is not None


def test_a_constitution_prefers_what_keeps_every_principle(
    nano: Nano, store: LogStore, tmp_path: Path
) -> None:
    kept = executed(store, act("write_file", path="b.py", content="x = 1\n"))
    broken = executed(store, act("write_file", path="b.py", content="import os\n"))
    principles = tmp_path / "principles.json"
    check = {"kind": "forbidden", "pattern": "^import os"}
    principles.write_text(json.dumps({"principles": [{"id": "no_os", "text": "No os.", "check": check}]}))
    out = tmp_path / "pairs.jsonl"
    code, _, err = nano(
        "preferences", "build", "--out", out, "--from", "constitution", "--principles", principles
    )
    assert code == 0, err
    (pair,) = read_pairs(out)
    assert (pair.source, pair.chosen_run, pair.rejected_run) == ("constitution", kept.id, broken.id)


@pytest.mark.slow
def test_a_judge_that_cannot_be_reached_makes_no_pair_and_is_counted(
    nano: Nano, store: LogStore, tmp_path: Path
) -> None:
    executed(store, act("write_file", path="b.py", content="x\n"))
    executed(store, act("write_file", path="b.py", content="y\n"))
    out = tmp_path / "pairs.jsonl"
    code, _, err = nano(
        "preferences", "build", "--out", out, "--from", "judge", "--judge-url", "http://127.0.0.1:9/v1"
    )
    assert code == 2
    assert "left out: 2 (judge: judge_unreachable)" in err
    assert "the judge did not answer (see above); check --judge-url" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--from", "judge"), "name a judge"),
        (("--judge-url", "http://127.0.0.1:9/v1"), "add --from judge"),
        (("--principles", "p.toml"), "--from constitution"),
        (("--from", "constitution", "--principles", "nowhere.toml"), "no such file: nowhere.toml"),
        (("--from", "nobody"), "'nobody' is not one of"),
    ],
)
def test_sources_that_cannot_be_asked_are_refused(
    nano: Nano, store: LogStore, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    out = tmp_path / "pairs.jsonl"
    code, told, err = nano("preferences", "build", "--out", out, *flags)
    assert (code, told) == (2, "")
    assert words in err.splitlines()[-1]
    assert not out.exists()
