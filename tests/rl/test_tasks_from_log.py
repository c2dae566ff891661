"""A logged run becomes a task: its workspace, its prompt, and a check that is graded afresh."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "coder"))

from executions import SUBMIT, a_runtime, a_task, act, limits

from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_rl.cli import cli
from nano_rl.tasks.from_log import distinct, task_from_run
from nano_rl.tasks.task_file import read_tasks
from nano_shared.command_line import run_command
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import CommandChecks
from nano_shared.snapshot import snapshot_directory
from nano_shared.types import OracleAction, Task, Trajectory, Trust

FIX = act("write_file", path="a.py", content="three\n")


def a_run(folder: Path, *texts: str, **changes: object) -> tuple[Trajectory, Runtime]:
    runtime = a_runtime(folder, [*texts, SUBMIT])
    task = a_task(**{"limits": limits(), "check": "grep -q three a.py"} | changes)
    run = grade_run(run_task(task, runtime, seed=1), runtime)
    return runtime.store.get(run.id), runtime


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        run_command(cli, ["tasks", *arguments])
    streams = capsys.readouterr()
    return int(end.value.code or 0), streams.out, streams.err


def test_the_task_of_a_run_is_admitted_with_the_run_as_its_oracle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = a_run(tmp_path, FIX)
    log, out = str(tmp_path / "log.db"), tmp_path / "tasks.jsonl"
    code, said, _ = command(capsys, "from-log", run.id, "-o", str(out), "--log", log)
    assert code == 0
    assert "trust user_check, reward 1.0; the run solves it" in said
    (task,) = read_tasks(out)
    assert (task.prompt, task.files, task.check) == (run.task.prompt, run.task.files, run.task.check)
    assert task.key != run.task.key  # another content under one key would spoil both groups
    code, said, _ = command(capsys, "check", str(out), "--json")
    assert code == 0, said
    assert json.loads(said)["admitted"] == 1


def test_a_check_of_the_user_is_run_afresh_on_the_original_tests(tmp_path: Path) -> None:
    cheat = act("write_file", path="test_a.py", content="pass\n")
    tests = {"a.py": "one\n", "test_a.py": "assert open('a.py').read() == 'three\\n'\n"}
    run, runtime = a_run(tmp_path, cheat, files=tests, check=None)
    made = task_from_run(run, runtime.store.blobs, runtime.sandbox, "python test_a.py")
    assert made.trust is Trust.USER_CHECK
    assert made.task.hidden == CommandChecks(command="python test_a.py")
    assert made.reward == 0  # with the tests as they were before the agent changed them
    assert made.task.oracle is None
    run, runtime = a_run(tmp_path, cheat, FIX, files=tests, check=None)
    better = task_from_run(run, runtime.store.blobs, runtime.sandbox, "python test_a.py")
    assert better.reward == 1
    assert [task.run for task in distinct([made, better])] == [run.id]  # the one with an oracle


def test_a_workspace_that_text_cannot_hold_stays_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "data.bin").write_bytes(b"\xff\x00")
    runtime = a_runtime(tmp_path, [FIX, SUBMIT])
    start = snapshot_directory(project, runtime.store.blobs)
    task = a_task(files={}, snapshot=start, check="grep -q three a.py", limits=limits())
    run = grade_run(run_task(task, runtime), runtime)
    made = task_from_run(run, runtime.store.blobs, runtime.sandbox)
    assert not made.portable
    assert made.task.snapshot == start
    out, log = tmp_path / "tasks.jsonl", str(tmp_path / "log.db")
    command(capsys, "from-log", run.id, "-o", str(out), "--log", log)
    code, said, _ = command(capsys, "check", str(out), "--json", "--log", log)
    assert code == 0, said


def test_a_run_that_failed_is_a_task_that_nobody_is_known_to_solve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = a_run(tmp_path)
    code, out, err = command(capsys, "from-log", run.id, "--log", str(tmp_path / "log.db"))
    assert code == 0
    assert Task.model_validate_json(out).oracle is None  # rows alone on standard output
    assert "no run is known to solve it" in err


def test_a_check_that_names_no_program_is_told_apart_from_one_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = a_run(tmp_path)
    log, out = str(tmp_path / "log.db"), str(tmp_path / "tasks.jsonl")
    for check, told in (("nosuch-program -q", True), ("grep -q four a.py", False)):
        code, said, _ = command(capsys, "from-log", run.id, "--check", check, "-o", out, "--log", log)
        assert code == 0  # what is missing now may be what the agent is asked to make
        assert "no run is known to solve it" in said
        assert ("names a program that is not there" in said) is told


def test_a_run_that_fails_is_not_said_to_solve_what_its_tasks_own_oracle_solves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oracle = (OracleAction(name="write_file", arguments={"path": "a.py", "content": "three\n"}),)
    run, _ = a_run(tmp_path, oracle=oracle)
    log, out = str(tmp_path / "log.db"), str(tmp_path / "tasks.jsonl")
    code, said, _ = command(capsys, "from-log", run.id, "-o", out, "--log", log)
    assert code == 0
    assert "reward 0.0; its own oracle solves it, the run does not" in said


def test_what_no_task_can_be_made_of_is_refused(tmp_path: Path) -> None:
    run, runtime = a_run(tmp_path, check=None)
    blobs, sandbox = runtime.store.blobs, runtime.sandbox
    with pytest.raises(UsageError, match="no check of its own"):
        task_from_run(run, blobs, sandbox)
    with pytest.raises(UsageError, match="no snapshot of the workspace"):
        task_from_run(run.model_copy(update={"snapshot": None}), blobs, sandbox, "true")
    with pytest.raises(UsageError, match="missing"):
        task_from_run(run.model_copy(update={"snapshot": f"sha256:{'0' * 64}"}), blobs, sandbox, "true")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nosuch",), "no run 'nosuch'"),
        (("last", "--check", ""), "--check is empty"),
        (("last", "--json"), "name one with -o"),
        ((), "RUN"),
    ],
)
def test_bad_input_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    a_run(tmp_path)
    code, out, err = command(capsys, "from-log", *arguments, "--log", str(tmp_path / "log.db"))
    assert code == 2
    assert says in err
    assert out == ""
