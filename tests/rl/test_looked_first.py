"""What a command is given is looked at before any work, and led to what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nano_coder.cli import cli as coder
from nano_rl.cli import cli
from nano_shared.command_line import run_command
from nano_shared.store import LogStore

Nano = Callable[..., tuple[int, str]]


@pytest.fixture
def nano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Nano:
    """Runs a command line in an empty home; no command comes as far as loading a model."""
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NANO_LOG", raising=False)
    monkeypatch.setattr("nano_rl.session.open_weights", None)
    monkeypatch.setattr("nano_rl.session.open_policy", None)
    tasks = {"key": "a", "prompt": "Say hi.", "files": {}}
    (tmp_path / "t.jsonl").write_text(json.dumps(tasks) + "\n")

    def call(line: str, program: object = cli) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            run_command(program, line.format(tmp=tmp_path).split())  # type: ignore[arg-type]
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sft --name x --messages {tmp}/no.jsonl", "no.jsonl: no such file"),
        ("sft --name x --tasks {tmp}/no.jsonl", "no.jsonl: no such file"),
        ("sft --name x --from-logs --log {tmp}/no.db", "no.db"),
        ("dpo --name x --pairs {tmp}/no.jsonl", "no.jsonl: no such file"),
        ("reward-model --name x --pairs {tmp}", "is a folder; name a file"),
        ("dpo --name x --from-logs --log {tmp}/no.db", "no.db"),
        ("train --name x --tasks {tmp}/no.jsonl", "no.jsonl"),
        ("train --name x --tasks {tmp}/t.jsonl --held-out {tmp}/no.jsonl", "no.jsonl"),
        ("eval --tasks {tmp}/t.jsonl --against tpyo", "unknown model 'tpyo'"),
        ("eval --tasks {tmp}/t.jsonl --model tpyo", "unknown model 'tpyo'"),
        ("train --name x --tasks {tmp}/t.jsonl --model gpt-5-mini", "a server's is openai:gpt-5-mini"),
        ("preferences build --out /proc/no/p.jsonl", "cannot be written"),
        ("tasks import {tmp}/t.jsonl --out /proc/no/t.jsonl", "cannot be written"),
    ],
)
def test_what_is_not_there_is_said_before_any_work(nano: Nano, tmp_path: Path, line: str, said: str) -> None:
    code, error = nano(line)
    assert code in (2, 3)
    assert said in error
    assert not (tmp_path / "home" / "trainings" / "x").exists()


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --name x --lr 1", "no such option: --lr; did you mean --learning-rate?"),
        ("sft --name x --lr 1", "did you mean --learning-rate?"),
        ("sft --name x --batch-size 4", "did you mean --set batch=...?"),
        ("train --name x --batch-size 4", "did you mean --prompts?"),
        ("train --name x --num-generations 4", "did you mean --group-size?"),
        ("train --name x --max-turns 4", "did you mean --limit max_turns=N?"),
        ("eval --limit turns=2", "did you mean max_turns?"),
        ("eval --limit 2", "write NAME=VALUE"),
        ("eval --limit seconds=2", "did you mean max_seconds or tool_seconds?"),
        ("train --name x --set guards=off", "guards is no setting; it holds guards.mismatch_max"),
        ("train --name x --set optimizer=3", "it holds optimizer.learning_rate"),
        ("train --name x --from-logs --fresh 0 --set logs.mutants=2", "logs.mutants acts beside fresh"),
    ],
)
def test_a_wrong_word_is_led_to_the_right_one(nano: Nano, line: str, said: str) -> None:
    code, error = nano(line)
    assert code == 2
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_a_hosted_model_is_named_with_its_scheme(nano: Nano) -> None:
    code, error = nano("run hi --model claude-9", coder)
    assert (code, "openai:claude-9" in error) == (2, True)


def test_asking_for_no_mutants_is_no_contradiction(nano: Nano, tmp_path: Path) -> None:
    LogStore.open(tmp_path / "l.db").close()
    line = "train --name x --from-logs --fresh 0 --set logs.mutants=0 --log {tmp}/no.db"
    assert "there is no such log" in nano(line)[1]


@pytest.mark.parametrize(
    ("setting", "acts"),
    [
        ("imitate=oracles", "lambda_sft above 0"),
        ("objective.max_staleness=3", "--async or --from-logs"),
    ],
)
def test_a_setting_that_cannot_act_is_said(nano: Nano, setting: str, acts: str) -> None:
    _, error = nano("train --name x --tasks {tmp}/no.jsonl --set " + setting)
    name = setting.partition("=")[0]
    assert f"{name} cannot act here: it is read with {acts}" in error
