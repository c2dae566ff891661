"""`redact = "write"` holds for whoever executes: rollouts, oracles, trainings and served environments too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from integration.tiny_model import build_tiny
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import grade_run, reflect_run, run_task
from nano_logs.redact.runs import RedactingStore
from nano_rl.cli import cli
from nano_rl.command_setup import oracle_runtime, training_runtime
from nano_rl.config import TrainConfig
from nano_rl.logs.admission import TargetPolicy, check_runs
from nano_rl.tasks.task_file import write_tasks
from nano_rl.training_record import TrainArguments
from nano_shared.command_line import run_command
from nano_shared.hidden_checks import CommandChecks
from nano_shared.store import LogStore
from nano_shared.types import Task, ToolCall

SECRET = "ghp_" + "aB3dE6gH9jK2mN5pQ8sTvW1xY4zA7cD0fG3h"
PASSWORD = "hunter-Two-93"
SECRETS = (SECRET.encode(), PASSWORD.encode())


def a_task(oracle: Sequence[ToolCall] | None = None) -> Task:
    return Task(
        key="deploy",
        prompt=f"Deploy with {SECRET} to https://admin:{PASSWORD}@example.org/app.",
        files={"conf.py": f'TOKEN = "{SECRET}"\n'},
        hidden=CommandChecks(command="true"),
        oracle=oracle,
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    texts = [m.content for m in first_messages(COMPACT_1, a_task(), ("conf.py",))]
    build_tiny(tmp_path / "tiny", texts, hidden=32, layers=1, max_positions=512, vocab_size=400)
    return tmp_path / "tiny"


def held(folder: Path) -> bytes:
    """All bytes of the database. The files of snapshots stay as they were: grading needs them."""
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


def rolled(tmp_path: Path, tiny: Path, *options: str) -> LogStore:
    write_tasks(tmp_path / "tasks.jsonl", [a_task()])
    log = tmp_path / "log" / "log.db"
    log.parent.mkdir()
    arguments = ["rollout", "--tasks", tmp_path / "tasks.jsonl", "--model", tiny, "--log", log]
    with pytest.raises(SystemExit) as end:
        run_command(
            cli,
            [str(a) for a in (*arguments, "--limit", "max_completion_tokens=8", "--group-size", 2, *options)],
        )
    assert end.value.code == 0
    return LogStore.open(log)


def test_rollouts_keep_no_secret_in_the_log(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_REDACT", "write")
    with rolled(tmp_path, tiny) as store:
        runs = list(store.trajectories())
        assert len(runs) == 2
        assert all(run.is_redacted for run in runs)
        target = TargetPolicy(profile=COMPACT_1, template_hash=runs[0].template_hash)
        (checked,) = check_runs(store.facts(), target)
        assert [code for _, code in checked] == ["redacted"] * 2
    assert not [secret for secret in SECRETS if secret in held(tmp_path / "log")]


def test_without_it_the_log_holds_what_happened(tmp_path: Path, tiny: Path) -> None:
    with rolled(tmp_path, tiny) as store:
        assert not any(run.is_redacted for run in store.trajectories())
    assert all(secret in held(tmp_path / "log") for secret in SECRETS)


def test_trainings_and_oracles_write_through_the_same_guard(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = str(tmp_path / "log.db")
    assert not isinstance(oracle_runtime(log).store, RedactingStore)
    monkeypatch.setenv("NANO_REDACT", "write")
    assert isinstance(oracle_runtime(log).store, RedactingStore)
    arguments = TrainArguments(name="one", model=str(tiny), logs=(log,))
    opened, runtime = training_runtime(arguments, TrainConfig())
    assert isinstance(runtime.store, RedactingStore)
    ids = opened.loaded.tokenizer.encode("Deploy", add_special_tokens=False)
    assert runtime.store._decode is not None
    assert runtime.store._decode(ids) == "Deploy"


def test_what_a_second_attempt_reads_of_its_check_is_scrubbed_with_its_blob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_REDACT", "write")
    submit = DIALECTS[COMPACT_1.dialect].render("", (ToolCall(name="submit", arguments={}),), COMPACT_1.tools)
    policy = ScriptedPolicy([submit, submit], tokens=True, context_limit=1_000_000)
    runtime = replace(oracle_runtime(str(tmp_path / "log.db")), policy=policy)
    task = Task(key="t", prompt="Fix it.", check=f"echo {SECRET}; seq 1 5000; false")
    failed = grade_run(run_task(task, runtime), runtime)
    second = reflect_run(failed, runtime)
    (told,) = [o for turn in second.turns for o in turn.observations if o.blob]
    assert SECRET.encode() not in runtime.store.get_blob(str(told.blob))
