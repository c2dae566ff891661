"""`nano-coder log import`: other agents' runs, all of them or none, and none of them twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_transcripts import (
    atif_document,
    claude_session,
    codex_rollout,
    gym_rollout,
    write_lines,
)
from typer.testing import CliRunner

from nano_coder.commands.log import command
from nano_coder.verify.trainable import verify
from nano_shared.errors import UsageError
from nano_shared.store import LogStore
from nano_shared.types import StopReason, Trajectory, Trust

Import = Callable[..., str]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


@pytest.fixture
def take(log: Path) -> Import:
    """Imports files of a format; gives what was printed."""

    def run(name: str, *files: Path) -> str:
        arguments = ["import", "--format", name, "--log", str(log), *map(str, files)]
        done = CliRunner().invoke(command, arguments, standalone_mode=False)
        if done.exception:
            raise done.exception
        return done.stdout

    return run


def the_runs(log: Path) -> list[Trajectory]:
    with LogStore.open(log, create=False) as store:
        return list(store.trajectories())


def test_a_session_of_claude_code(log: Path, tmp_path: Path, take: Import) -> None:
    said = take("claude-code", write_lines(tmp_path / "s.jsonl", claude_session()))
    assert said == "imported 1 runs; 1 of the file are text-only\n"
    (run,) = the_runs(log)
    assert run.task.prompt == "Why does total() fail?"
    assert (run.runtime_version, run.policy, run.stop) == (
        "claude-code 2.1.12", "claude-sonnet-4-5", StopReason.FINISHED,
    )  # fmt: skip
    looked, answered, done = run.turns
    assert looked.thought == "<think>\nLook first.\n</think>\n\nI read both files."
    assert [call.arguments["file_path"] for call in looked.calls] == ["a.py", "b.py"]
    assert [(seen.text, seen.ok) for seen in looked.observations] == [
        ("1\timport b", True), ("File does not exist.", False),
    ]  # fmt: skip
    assert [(seen.tool, seen.text) for seen in answered.observations] == [("user", "Make it then.")]
    assert done.completion.text == "Done."  # and not the error that the program wrote in its name
    assert "text-only" in {finding.kind for finding in verify(run) if finding.blocks}


def test_a_rollout_file_of_codex(log: Path, tmp_path: Path, take: Import) -> None:
    take("codex", write_lines(tmp_path / "rollout.jsonl", codex_rollout()))
    (run,) = the_runs(log)
    assert (run.task.prompt, run.policy) == ("Make the tests pass.", "gpt-5-codex")
    tested, patched, ended = run.turns
    assert tested.calls[0].arguments["cmd"] == "pytest -q"
    assert "Run the tests." in tested.thought
    assert tested.observations[0].text.endswith("1 failed")
    assert patched.calls[0].arguments == {"input": "*** Begin Patch\n*** End Patch"}
    assert (ended.completion.text, run.stop) == ("The tests pass.", StopReason.FINISHED)
    assert run.task.provenance.original is not None
    assert run.task.provenance.original["opening"][0] == {  # type: ignore[index, call-overload]
        "role": "system", "content": "You are a coding agent.",
    }  # fmt: skip


def test_what_a_user_of_codex_took_back_is_no_part_of_the_run(
    log: Path, tmp_path: Path, take: Import
) -> None:
    rows = codex_rollout()
    again = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Now break it."}]}
    back = {"type": "thread_rolled_back", "num_turns": 1}
    rows += [
        {"timestamp": "2026-03-01T10:01:00Z", "type": "response_item", "payload": again},
        {"timestamp": "2026-03-01T10:01:00Z", "type": "event_msg", "payload": back},
    ]
    take("codex", write_lines(tmp_path / "rollout.jsonl", rows))
    (run,) = the_runs(log)
    assert run.turns[-1].observations == ()


def test_a_rollout_with_the_token_triple_is_a_run_with_tokens(
    log: Path, tmp_path: Path, take: Import
) -> None:
    said = take("nemo-gym", write_lines(tmp_path / "r.jsonl", [gym_rollout()]))
    assert said == "imported 1 runs\n"
    (run,) = the_runs(log)
    first, second = (turn.completion.tokens for turn in run.turns)
    assert first is not None
    assert second is not None
    assert (first.context_ids, first.sampled_ids, first.row) == ((1, 2), (3, 4), 0)
    assert (second.context_ids, second.sampled_ids, second.row) == ((5,), (6,), 0)
    assert run.turns[0].completion.sampling.temperature == 0.7
    assert run.verdict is not None
    assert (run.verdict.reward, run.verdict.trust) == (1.0, Trust.NONE)
    # others' tokens train nothing here until somebody vouches for template, profile and verdict
    assert {f.kind for f in verify(run) if f.blocks} == {"other profile", "low trust"}


def test_rollouts_of_one_input_share_a_task_and_masked_rewards_are_none(
    log: Path, tmp_path: Path, take: Import
) -> None:
    rows = [
        gym_rollout(),
        gym_rollout(_ng_rollout_index=2, reward=0.0, mask_sample=True, failure_kind="judge_failed"),
    ]
    take("nemo-gym", write_lines(tmp_path / "r.jsonl", rows))
    one, other = the_runs(log)
    assert one.task == other.task
    assert {one.reward, other.reward} == {1.0, None}


def test_a_prompt_that_does_not_extend_what_was_read_begins_a_row(
    log: Path, tmp_path: Path, take: Import
) -> None:
    row = gym_rollout()
    row["response"]["output"][-1]["prompt_token_ids"] = [9, 9]
    take("nemo-gym", write_lines(tmp_path / "r.jsonl", [row]))
    (run,) = the_runs(log)
    assert [turn.completion.tokens.row for turn in run.turns if turn.completion.tokens] == [0, 1]


def test_a_trajectory_of_atif_by_another_agent(log: Path, tmp_path: Path, take: Import) -> None:
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(atif_document()))
    take("atif", file)
    (run,) = the_runs(log)
    counted, ended = run.turns  # what was copied, and what the harness wrote, are no turns
    assert counted.completion.tokens is not None
    assert counted.completion.tokens.sampled_ids == (3,)
    assert ended.completion.tokens is None
    assert [seen.text for seen in counted.observations] == ["a\nb", "Nudge."]


def test_subagents_of_atif_are_runs_with_a_parent(log: Path, tmp_path: Path, take: Import) -> None:
    sub = atif_document(trajectory_id="sub", agent={"name": "helper", "version": "1"})
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(atif_document(subagent_trajectories=[sub])))
    take("atif", file)
    runs = {run.runtime_version: run for run in the_runs(log)}
    assert runs["helper 1"].parent == runs["openhands 1.2"].id


@pytest.mark.parametrize("name", ["claude-code", "codex", "nemo-gym"])
def test_a_file_imported_twice_is_written_once(log: Path, tmp_path: Path, take: Import, name: str) -> None:
    rows = {"claude-code": claude_session(), "codex": codex_rollout(), "nemo-gym": [gym_rollout()]}[name]
    file = write_lines(tmp_path / "f.jsonl", rows)
    take(name, file)
    before = the_runs(log)
    assert "imported 0 runs; 1 were in the log already" in take(name, file)
    assert the_runs(log) == before


@pytest.mark.slow
def test_one_bad_row_among_many_leaves_the_log_as_it_was(log: Path, tmp_path: Path, take: Import) -> None:
    rows = [gym_rollout(_ng_rollout_index=number) for number in range(2000)]
    rows[1700]["response"] = gym_rollout()["response"] | {"output": [{"type": "function_call", "name": 3}]}
    file = write_lines(tmp_path / "r.jsonl", rows)
    with pytest.raises(UsageError) as problem:
        take("nemo-gym", file)
    assert str(problem.value).startswith(f"nothing was imported: {file}:1701: response.output.0.arguments")
    assert problem.value.exit_code == 2
    assert not log.exists()


def bad(change: Callable[[dict[str, Any]], Any]) -> bytes:
    row = gym_rollout()
    change(row)
    return json.dumps(row).encode()


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("nemo-gym", b'{"responses_create_params": {"inp', "1: row: is not JSON"),
        ("nemo-gym", b'{"a": "\xff"}', "1: row: is not UTF-8"),
        ("nemo-gym", b'{"reward": 1, "reward": 0}', "reward: is given twice"),
        ("nemo-gym", b"[1]", "must be a JSON object, not list"),
        ("nemo-gym", b"", "no run in"),
        ("nemo-gym", bad(lambda r: r.pop("reward")), "reward: must be a finite number"),
        ("nemo-gym", bad(lambda r: r["response"]["output"][3]["generation_log_probs"].append(-1)),
         "response.output.3.generation_log_probs: differ in number"),
        ("nemo-gym", bad(lambda r: r["response"]["output"][3].update(generation_log_probs=[0.5])),
         "generation_log_probs: must hold log-probs"),
        ("nemo-gym", bad(lambda r: r["response"]["output"][1].update(generation_token_ids=[-3, 4])),
         "generation_token_ids: must hold token ids"),
        ("nemo-gym", bad(lambda r: r["response"]["output"][2].update(call_id="zz")), "'zz' answers no call"),
        ("atif", json.dumps(atif_document(schema_version="ATIF-v2.0")).encode(), "'ATIF-v2.0' is none that"),
        ("atif", json.dumps(atif_document(steps=[{"step_id": 2, "source": "user"}])).encode(),
         "steps.0.step_id: must be 1"),
        ("atif", json.dumps(atif_document(agent={"name": "x"})).encode(), "agent.version: Field required"),
        ("atif", json.dumps(atif_document(extra={"nano": {"format": 9}})).encode(), "a newer nano wrote it"),
        ("claude-code", b'{"type": "user", "message": {"content": "hi"}}', "asks for anything"),
        ("claude-code", b'{"type": "user", "uuid": "u", "message": 3}', "1: message: must be an object"),
        ("codex", b'{"type": "tomorrow", "payload": {}}', "1: type: 'tomorrow' is no record"),
        ("jsonl", b'{"nano_log": 2}', "a newer nano wrote the file"),
        ("jsonl", b'{"trajectory": {}}', "1: nano_log: is missing"),
        ("jsonl", b'{"nano_log": 1}\n{"trajectory": {"id": 3}}', "2: trajectory.id"),
        ("jsonl", b'{"nano_log": 1}\n{"blob": "sha256:0", "base64": "aGk="}', "is not the hash of its bytes"),
        ("word", b"{}", "there is no format 'word'"),
    ],
)  # fmt: skip
def test_a_bad_file_is_said_by_place_and_field(
    log: Path, tmp_path: Path, take: Import, name: str, data: bytes, says: str
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(data)
    with pytest.raises(UsageError) as problem:
        take(name, file)
    assert says in str(problem.value)
    assert problem.value.exit_code == 2
    assert not log.exists()


def test_a_file_that_is_not_there(tmp_path: Path, take: Import) -> None:
    for name in ("nemo-gym", "claude-code"):
        with pytest.raises(UsageError, match=r"cannot be read: No such file"):
            take(name, tmp_path / "nowhere.json")
