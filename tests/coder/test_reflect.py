"""Reflection: after a failed check, one more attempt reads the diff and what the check printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits, prompt_proof

from nano_coder.cli import cli
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import REFLECTION, attempt_task, grade_run, is_reflection, reflect_run, run_task
from nano_rl.learn.groups import to_samples
from nano_shared.command_line import run_command
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import CommandChecks

WRONG = act("write_file", path="a.py", content="two\n")
RIGHT = act("write_file", path="a.py", content="three\n")
CHECK = "echo looking for three; grep three a.py"


def test_the_second_attempt_reads_its_diff_and_what_the_check_said(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [WRONG, SUBMIT, RIGHT, SUBMIT])
    first, second = attempt_task(a_task(check=CHECK), runtime, reflect=1)
    assert (first.reward, second.reward) == (0.0, 1.0)
    assert (second.parent, second.parent_step) == (first.id, 2)
    told = second.turns[1].observations[-1]
    assert told.tool == REFLECTION
    assert "-one" in told.text
    assert "looking for three" in told.text
    assert told.exit_code == 1
    logged = runtime.store.get(second.id)
    assert logged == second
    assert is_reflection(logged)
    assert not is_reflection(first)
    (sample,) = to_samples(logged, 1.0)  # only the second attempt is trained
    assert sum(sample.mask) == sum(len(text.encode()) + 1 for text in (RIGHT, SUBMIT))
    assert prompt_proof(logged, runtime).equal == 4


def test_attempts_end_with_success_or_with_their_number(tmp_path: Path) -> None:
    def attempts(texts: list[str], reflect: int) -> list[float | None]:
        runtime = a_runtime(tmp_path, texts)
        return [run.reward for run in attempt_task(a_task(check=CHECK), runtime, reflect=reflect)]

    assert attempts([RIGHT, SUBMIT], 3) == [1.0]
    assert attempts([WRONG, SUBMIT], 0) == [0.0]
    assert attempts([SUBMIT, WRONG, SUBMIT, RIGHT, SUBMIT], 3) == [0.0, 0.0, 1.0]


def test_each_attempt_has_as_many_turns_as_the_first(tmp_path: Path) -> None:
    looks = [act("shell", command=f"echo {n}") for n in range(9)]
    runtime = a_runtime(tmp_path, looks)
    runs = attempt_task(a_task(check=CHECK, limits=limits(max_turns=3)), runtime, reflect=2)
    assert [len(run.own_turns) for run in runs] == [3, 3, 3]
    assert [len(run.turns) for run in runs] == [3, 6, 9]


def test_a_hidden_check_stays_hidden(tmp_path: Path) -> None:
    hidden = CommandChecks(command="grep -q secret-word a.py")
    runtime = a_runtime(tmp_path, [SUBMIT, SUBMIT])
    _, second = attempt_task(a_task(hidden=hidden), runtime, reflect=1)
    told = second.turns[0].observations[-1].text
    assert "failed" in told
    assert "secret-word" not in told
    runtime = a_runtime(tmp_path, [SUBMIT, SUBMIT])
    _, second = attempt_task(a_task(hidden=hidden, check="true"), runtime, reflect=1)
    assert "Other checks failed" in second.turns[0].observations[-1].text


def test_long_output_is_cut_and_the_whole_of_it_lies_in_the_workspace(tmp_path: Path) -> None:
    look = act("shell", command="tail -n 3 .nano/output_0_1.txt")
    runtime = a_runtime(tmp_path, [SUBMIT, look, SUBMIT])
    _, second = attempt_task(a_task(check="seq 1 5000; false"), runtime, reflect=1)
    assert second.turns[0].observations[-1].truncated
    assert "exit code 1" in second.turns[1].observations[0].text


def test_a_failed_run_of_the_log_can_be_reflected_on_many_times(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [WRONG, SUBMIT])
    failed = runtime.store.get(grade_run(run_task(a_task(check=CHECK), runtime), runtime).id)
    runs = [
        grade_run(reflect_run(failed, replace(runtime, policy=ScriptedPolicy(texts, tokens=True))), runtime)
        for texts in ([RIGHT, SUBMIT], [SUBMIT])
    ]
    assert [run.reward for run in runs] == [1.0, 0.0]
    assert len({run.group_key for run in runs}) == 1  # a group that trains reflection
    assert len({run.task.id for run in runs}) == 1
    with pytest.raises(UsageError, match="nothing to reflect on"):
        reflect_run(runs[0], runtime)


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run_command(cli, ["run", *arguments])
    streams = capsys.readouterr()
    return int(end.value.code or 0), streams.out, streams.err


@pytest.mark.slow
def test_the_command_reports_both_rewards(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.py").write_text("one\n")
    flags = ("-C", str(work), "--log", str(tmp_path / "log.db"), "--model", str(tiny_folder))
    code, out, _ = command(
        capsys, "fix it", *flags, "--limit", "max_turns=1", "--check", "false", "--json", "--reflect"
    )
    report = json.loads(out)
    assert code == report["exit_code"] != 0
    assert [attempt["reward"] for attempt in report["attempts"]] == [0.0, 0.0]
    assert report["attempts"][1]["run"] == report["run"]
    code, out, err = command(capsys, "fix it", *flags, "--reflect=2")
    assert code == 2
    assert "--reflect needs a --check" in err
