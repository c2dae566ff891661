"""A run under `redact = "write"`: executed as ever, logged without its secret, fit for imitation alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task, act
from typer.testing import CliRunner

from nano_coder.cli import cli
from nano_coder.config import load_config
from nano_coder.models.scripted import EOS_ID
from nano_coder.run.execution import grade_run, resume_run, run_task
from nano_coder.run.fork import fork_run
from nano_coder.verify.tokens import deep_verify
from nano_coder.verify.trainable import verify
from nano_logs.redact.redactor import Redactor
from nano_logs.redact.runs import RedactingStore
from nano_shared.errors import ConfigError, UsageError
from nano_shared.run_facts import facts_of
from nano_shared.store import LogStore
from nano_shared.types import REDACTED_ID

SECRET = "glpat-" + "aB3dE6gH9jK2mN5pQ8sT"


def decode(ids) -> str:  # type: ignore[no-untyped-def]
    """Of the scripted policy, whose ids are bytes."""
    return bytes(i for i in ids if i < EOS_ID).decode(errors="replace")


@pytest.fixture
def logged(tmp_path: Path):  # type: ignore[no-untyped-def]
    """A run that printed a secret, as it happened, and the runtime that logged it."""
    runtime = a_runtime(tmp_path, [act("shell", command="cat .env; echo 2 > a.py"), SUBMIT])
    runtime = replace(runtime, store=RedactingStore(runtime.store, Redactor(), decode))
    task = a_task(
        files={".env": f"TOKEN={SECRET}\n", "a.py": "1\n"}, check="grep -q 2 a.py && grep -q glpat .env"
    )
    return grade_run(run_task(task, runtime), runtime), runtime


def test_the_run_is_as_ever_and_the_log_without_its_secret(logged, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run, runtime = logged
    assert SECRET in run.turns[0].observations[0].text
    assert run.reward == 1  # graded on the true files
    read = runtime.store.get(run.id)
    assert SECRET not in read.model_dump_json()
    assert read.turns[0].completion == run.turns[0].completion  # what the policy said held no secret
    before, after = run.turns[1].completion.tokens, read.turns[1].completion.tokens
    assert len(after.context_ids) == len(before.context_ids)
    assert after.sampled_ids == before.sampled_ids
    assert after.context_ids.count(REDACTED_ID) == len(SECRET)
    assert SECRET not in decode(after.context_ids)


def test_what_people_say_later_is_scrubbed_too(logged, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    run, runtime = logged
    monkeypatch.setenv("NANO_REDACT", "write")
    said = ["feedback", run.id, "--log", runtime.store.url, "--note", f"it printed {SECRET}"]
    assert CliRunner().invoke(cli, said).exit_code == 0
    (row,) = runtime.store.feedback(run.id)
    assert row.text == "it printed [redacted:token]"


def test_a_redacted_run_trains_no_policy_gradient(logged) -> None:  # type: ignore[no-untyped-def]
    run, runtime = logged
    kinds = [finding.kind for finding in verify(runtime.store.get(run.id)) if finding.blocks]
    assert "redacted" in kinds
    assert not any(finding.kind == "redacted" for finding in verify(run))


def test_a_redacted_run_does_not_resume(logged) -> None:  # type: ignore[no-untyped-def]
    run, runtime = logged
    interrupted = runtime.store.get(run.id).model_copy(
        update={"stop": None, "ended": None, "verdict": None, "id": "cut"}
    )
    runtime.store.append(interrupted)
    with pytest.raises(UsageError, match="run cut was redacted"):
        resume_run("cut", runtime)


def test_a_redacted_run_is_neither_gone_on_from_nor_re_fed_nor_certified(logged) -> None:  # type: ignore[no-untyped-def]
    run, runtime = logged
    read = runtime.store.get(run.id)
    with pytest.raises(UsageError, match="was redacted: the tokens to continue from"):
        fork_run(read, runtime, at=1, n=1)
    assert [finding.kind for finding in deep_verify(facts_of(read), runtime.store).findings] == ["redacted"]


def test_log_redact_drops_what_a_run_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runtime = a_runtime(tmp_path, [act("shell", command="cat .env"), SUBMIT])
    run = run_task(a_task(files={".env": f"TOKEN={SECRET}\n"}), runtime)
    clean = run_task(a_task(), replace(runtime, policy=a_runtime(tmp_path / "other", [SUBMIT]).policy))
    runtime.store.close()
    log = tmp_path / "log.db"
    asked = ["log", "redact", run.id, clean.id, "--log", str(log)]
    result = CliRunner().invoke(cli, asked, catch_exceptions=False)
    assert result.output == f"run {run.id}: redacted\nrun {clean.id}: nothing to redact\n"
    packed = b"".join(ord(c).to_bytes(4, "little") for c in SECRET)
    for path in tmp_path.glob("log.db*"):
        assert SECRET.encode() not in path.read_bytes()
        assert packed not in path.read_bytes()
    with LogStore.open(log) as store:
        read = store.get(run.id)
        assert read.is_redacted
        assert store.get(clean.id) == clean
        assert [len(t.completion.tokens.context_ids) for t in read.turns if t.completion.tokens] == [
            len(t.completion.tokens.context_ids) for t in run.turns if t.completion.tokens
        ]
    again = CliRunner().invoke(cli, asked[:3] + asked[4:], catch_exceptions=False)
    assert again.output == f"run {run.id}: nothing to redact\n"


def test_the_setting_comes_in_two_forms_and_a_project_cannot_turn_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert load_config({}, tmp_path)[0].redact.on == "off"
    (tmp_path / "nano.toml").write_text('[redact]\non = "write"\n')
    config, sources = load_config({}, tmp_path)
    assert (config.redact.on, sources["redact"]) == ("write", "nano.toml")
    monkeypatch.setenv("NANO_REDACT", "off")
    assert load_config({}, tmp_path)[0].redact.on == "off"
    monkeypatch.delenv("NANO_REDACT")
    (tmp_path / "config/nano").mkdir(parents=True)
    (tmp_path / "config/nano/config.toml").write_text('redact = "write"\n')
    (tmp_path / "nano.toml").write_text('redact = "off"\n')
    assert load_config({}, tmp_path)[0].redact.on == "write"
    (tmp_path / "nano.toml").write_text('redact = "always"\n')
    with pytest.raises(ConfigError, match="redact"):
        load_config({}, tmp_path)
