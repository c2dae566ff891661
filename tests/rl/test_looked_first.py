"""What a command is given is looked at before any work, and led to what is right."""

from __future__ import annotations

import gzip
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
    monkeypatch.setattr("nano_rl.command_setup.open_weights", None)
    monkeypatch.setattr("nano_rl.command_setup.open_policy", None)
    tasks = {"key": "a", "prompt": "Say hi.", "files": {}}
    (tmp_path / "t.jsonl").write_text(json.dumps(tasks) + "\n")
    (tmp_path / "t.jsonl.gz").write_bytes(packed := gzip.compress((tmp_path / "t.jsonl").read_bytes()))
    (tmp_path / "z.jsonl").write_bytes(packed[:10] + b"\xff" * 20)
    (tmp_path / "r.py").write_text("class C: ...\ndef f(completions, gold): ...")
    (tmp_path / "l.jsonl").write_bytes(b'\n{"prompt": "gr\xfc\xdf"}\n')

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
        ("checkpoints best x --as ../y", "--as '../y': use letters"),
        ("train --name x --tasks {tmp}/t.jsonl --held-out {tmp}/no.jsonl", "no.jsonl"),
        (
            "train --name x --tasks {tmp}/t.jsonl --held-out {tmp}/t.jsonl",
            "1 of the 1 held-out tasks are among",
        ),
        ("train --name x --tasks {tmp}/t.jsonl --resume", "there is no training x to resume"),
        ("train --name x --tasks {tmp}/z.jsonl", "z.jsonl: cannot be read: Error -3"),
        (
            "tasks import {tmp}/l.jsonl --out {tmp}/o.jsonl",
            "l.jsonl:2: row: is not UTF-8: invalid start byte",
        ),
        ("train --name x --tasks {tmp}/t.jsonl.gz --held-out {tmp}/t.jsonl", "1 of the 1 held-out tasks"),
        ("train --name x --tasks {tmp}/l.jsonl", "l.jsonl:2: row: is not UTF-8: invalid start byte"),
        ("eval --tasks {tmp}/t.jsonl --against tpyo", "unknown model 'tpyo'"),
        ("eval --tasks {tmp}/t.jsonl --model tpyo", "unknown model 'tpyo'"),
        ("train --name x --tasks {tmp}/t.jsonl --model gpt-5-mini", "a server's is openai:gpt-5-mini"),
        ("preferences build --out /proc/no/p.jsonl", "cannot be written"),
        ("report x --output /", "cannot be written"),
        ("tasks check {tmp}/t.jsonl --out {tmp}/../{tmp.name}/t.jsonl", "is what is read, and would be over"),
        ("tasks import {tmp}/t.jsonl --out {tmp}/t.jsonl", "is what is read, and would be overwritten"),
        ("tasks export {tmp}/t.jsonl --to rows --out {tmp}/t.jsonl", "is what is read, and would be"),
        ("tasks import {tmp}/t.jsonl --out /proc/no/t.jsonl", "cannot be written"),
    ],
)
def test_what_is_not_there_is_said_before_any_work(nano: Nano, tmp_path: Path, line: str, said: str) -> None:
    code, error = nano(line)
    assert code in (2, 3)
    assert said in error
    assert not [*(tmp_path / "home" / "trainings").glob("x/*")]  # an empty folder goes when the command ends


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
        ("train --name x --gpus 2", "did you mean --device cuda?"),
        ("train --name x --set lr=1", "lr: no such setting; did you mean optimizer.learning_rate?"),
        ("train --name x --set kl=1", "did you mean objective.beta?"),
        ("train --name x --set =3", "--set =3: write NAME=VALUE"),
        (
            "train --name x --tasks {tmp}/t.jsonl --device gpu",
            "--device: device = 'gpu': string should match",
        ),
        ("train --name x --tasks {tmp}/t.jsonl --reward tests=-1", "reward part tests: weight = -1.0"),
        ("train --name x --tasks {tmp}/t.jsonl --reward tests=nan", "should be a finite number"),
        ("train --name x --tasks {tmp}/t.jsonl --reward tets=1", "unknown reward part 'tets'"),
        ("eval --tasks {tmp}/t.jsonl --temperature inf", "less than or equal to 100"),
        ("train --name x --tasks {tmp}/t.jsonl --reward {tmp}/r.py:C=1", "is no subclass of"),
        ("train --name x --tasks {tmp}/t.jsonl --reward {tmp}/r.py:g=1", "what fits there is f"),
        ("train --name x --tasks {tmp}/t.jsonl --reward {tmp}/r.py:f=1", "wants 'gold', which task"),
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


@pytest.mark.slow
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


def test_a_home_that_cannot_be_written_is_said_with_the_way_out(
    nano: Nano, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", "/proc/no")
    code, error = nano("train --name x --tasks {tmp}/t.jsonl")
    assert (code, "NANO_HOME names another folder" in error) == (2, True), error
