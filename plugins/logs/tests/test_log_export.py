"""`nano-coder log export`: whole files or none, in the shapes that the field's programs take."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from agent_transcripts import claude_session, write_lines
from executions import a_runtime, a_task, act
from typer.testing import CliRunner

from nano_coder.commands.log import command
from nano_coder.run.execution import grade_run, run_task
from nano_rl.imitation import Chat
from nano_shared.errors import UsageError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.owners import User
from nano_shared.store import LogStore
from nano_shared.types import Share, Trajectory

Log = Callable[..., str]
STEPS = ("id", "type", "function")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a log: a success, a failure with two verdicts and feedback, and an imported session."""
    folder = tmp_path_factory.mktemp("made")
    for number, word in enumerate(("two", "three")):
        script = [act("write_file", path="a.py", content=f"x = '{word}'\n"), act("submit", answer=word)]
        runtime = a_runtime(folder, script)
        runtime.store.user = User(name="ann@there", share=Share.TRAIN)
        run = run_task(a_task(key=f"words-{number}", check="grep -q two a.py"), runtime)
        graded = grade_run(run, runtime)
        assert graded.verdict is not None
        if number:
            runtime.store.add_verdict(run.id, graded.verdict)
            said = Feedback(kind=FeedbackKind.NOTE, text="wrong word", turn=0, created=3.0)
            runtime.store.add_feedback(run.id, said)
        runtime.store.close()
    session = write_lines(folder / "s.jsonl", claude_session())
    invoke("import", "--format", "claude-code", session, "--log", folder / "log.db")
    return folder


@pytest.fixture
def log(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "log")
    return tmp_path / "log" / "log.db"


def invoke(*arguments: str | Path) -> str:
    done = CliRunner().invoke(command, [str(a) for a in arguments], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.stdout


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in invoke("export", *arguments).splitlines() if line.startswith("{")]


def runs_of(log: Path) -> list[Trajectory]:
    with LogStore.open(log, create=False) as store:
        return list(store.trajectories())


def test_our_own_lines_bring_everything_to_another_log(log: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "all.jsonl", tmp_path / "elsewhere" / "log.db"
    assert invoke("export", "--format", "jsonl", "-o", out, "--log", log) == f"3 runs in {out}\n"
    assert invoke("import", "--format", "jsonl", out, "--log", other).startswith("imported 3 runs")
    with LogStore.open(log) as here, LogStore.open(other) as there:
        for run in here.trajectories():
            assert there.logged(run.id) == here.logged(run.id)
            for turn in run.turns:
                if turn.snapshot is not None:
                    assert there.get_blob(turn.snapshot) == here.get_blob(turn.snapshot)
        blobs = {p.name for p in here.blobs.root.rglob("*") if p.is_file()}
        assert {p.name for p in there.blobs.root.rglob("*") if p.is_file()} <= blobs
    assert "imported 0 runs; 3 were in the log already" in invoke(
        "import", "--format", "jsonl", out, "--log", other
    )


def test_messages_are_what_the_trainer_of_imitation_reads(log: Path) -> None:
    found = rows("--format", "messages", "--task", "words-*", "--log", log)
    assert len(found) == 2
    for row in found:
        chat = Chat.model_validate(row)  # `nano-rl sft` refuses every other key
        roles = [message.role.value for message in chat.messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert "Files: a.py" in found[0]["messages"][1]["content"]


def test_native_calls_stand_beside_the_text_and_are_answered_by_id(log: Path) -> None:
    for row in rows("--format", "messages", "--calls", "native", "--log", log):
        offered = {tool["function"]["name"] for tool in row.get("tools", [])}
        asked: dict[str, str] = {}
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                assert tuple(call) == STEPS
                assert isinstance(call["function"]["arguments"], dict)
                assert not offered or call["function"]["name"] in offered
                asked[call["id"]] = call["function"]["name"]
            if message["role"] == "tool":
                assert asked[message["tool_call_id"]] == message["name"]
        assert row["messages"][-1]["role"] == "assistant"


def test_only_successes(log: Path) -> None:
    (row,) = rows("--format", "messages", "--successes", "--log", log)
    assert "two" in row["messages"][2]["content"]


def test_atif_keeps_the_rules_of_its_validator(log: Path, tmp_path: Path) -> None:
    invoke("export", "--format", "atif", "-o", tmp_path / "atif", "--log", log)
    files = sorted((tmp_path / "atif").iterdir())
    assert [file.stem for file in files] == sorted(run.id for run in runs_of(log))
    for file in files:
        document = json.loads(file.read_text())
        assert document["schema_version"] == "ATIF-v1.8"
        assert set(document) <= {
            "schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra",
        }  # fmt: skip
        assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
        for step in document["steps"]:
            if step["source"] != "agent":
                assert set(step) == {"step_id", "source", "message"}
            calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            answered = {r.get("source_call_id") for r in step.get("observation", {}).get("results", ())}
            assert answered - {None} <= calls


@pytest.mark.parametrize(("name", "file"), [("atif", "runs.jsonl"), ("nemo-gym", "runs.jsonl")])
def test_other_formats_come_back_as_the_runs_they_were(
    log: Path, tmp_path: Path, name: str, file: str
) -> None:
    other = tmp_path / "other.db"
    invoke("export", "--format", name, "-o", tmp_path / file, "--log", log)
    invoke("import", "--format", name, tmp_path / file, "--log", other)
    whose = {"owner": None, "share": None}  # other formats do not say: they are the importer's
    before, after = ([run.model_copy(update=whose) for run in runs_of(each)] for each in (log, other))
    assert after == before


def test_an_edited_document_is_refused_by_the_field_that_was_edited(log: Path, tmp_path: Path) -> None:
    (row,) = rows("--format", "atif", runs_of(log)[-1].id, "--log", log)
    row["steps"][-1]["message"] = "something else"
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(row))
    with pytest.raises(UsageError, match=r"steps\.\d+\.message: was edited"):
        invoke("import", "--format", "atif", file, "--log", tmp_path / "other.db")


def test_a_rollout_of_nemo_gym_says_what_it_earned(log: Path) -> None:
    good, bad, foreign = rows("--format", "nemo-gym", "--log", log)[:2] + rows(
        "--format", "nemo-gym", "--task", "claude-code/*", "--log", log
    )
    by_reward = sorted((good, bad), key=lambda row: -row["reward"])
    assert [row["reward"] for row in by_reward] in ([1.0, 0.0], [1.0, 1.0], [0.0, 0.0])
    assert foreign["mask_sample"] is True  # nobody graded it


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--format", "excel"], "there is no format 'excel'; the formats are jsonl"),
        (["--format", "tokens"], "nano-rl export --format tokens"),
        (["--format", "jsonl", "--task", "nothing"], "holds no run that was asked for"),
        (["--format", "jsonl", "zzz"], "no run 'zzz'"),
        (["--format", "jsonl", "last", "--task", "a"], "not both"),
        (["--format", "jsonl", "--since", "yesterday"], "'yesterday' is no time"),
        (["--format", "jsonl", "-o", "TMP/none/x.jsonl"], "there is no folder"),
        (["--format", "jsonl", "-o", "TMP/log/log.db"], "exists already"),
        (["--format", "atif", "-o", "TMP/x.json"], "one atif file holds one run"),
        (["--format", "atif", "--calls", "native"], "--calls belongs to"),
    ],
)
def test_what_cannot_be_written_is_said_and_leaves_nothing(
    log: Path, tmp_path: Path, arguments: list[str], says: str
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises((UsageError, typer.TyperException)) as problem:
        invoke("export", *(a.replace("TMP", str(tmp_path)) for a in arguments), "--log", log)
    assert says in str(problem.value)
    assert getattr(problem.value, "exit_code", None) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_blob_that_is_gone_is_said_and_the_run_still_goes(log: Path, tmp_path: Path) -> None:
    with LogStore.open(log) as store:
        run = next(run for run in store.trajectories() if run.snapshot)
        assert run.snapshot is not None
        store.blobs.path(run.snapshot).unlink()
    arguments = ["export", "--format", "jsonl", run.id, "-o", str(tmp_path / "one.jsonl"), "--log", str(log)]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0
    assert "1 blobs" in done.stderr


def test_secrets_stay_behind_or_the_flag_is_refused(log: Path, tmp_path: Path) -> None:
    """Both are right: redaction is a part that an installation may lack, and then nothing is written."""
    key = "AKIA" + "Q3ZL7XWN2HVB5TKD"
    with LogStore.open(log) as store:
        run = next(run for run in store.trajectories() if run.snapshot)
        store.add_feedback(run.id, Feedback(kind=FeedbackKind.NOTE, text=f"the key {key}", created=1.0))
    out = tmp_path / "out.jsonl"
    arguments = ("export", "--format", "jsonl", run.id, "-o", out, "--log", log)
    if find_spec("nano_logs.redact") is None:
        with pytest.raises(UsageError, match="has no redaction"):
            invoke(*arguments, "--redact")
        assert not out.exists()
        return
    invoke(*arguments, "--redact")
    assert key not in out.read_text()
    assert '"base64"' not in out.read_text()
