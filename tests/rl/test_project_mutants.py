"""Mutants of a user's project become tasks: killed by the user's own check, solved by the line put back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from looping import tiny_model
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "coder"))

from executions import SUBMIT, a_runtime, a_task, act, limits

from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_mining.task_check import check_task
from nano_rl.cli import cli
from nano_rl.learn.metrics import METRICS, read_metrics
from nano_rl.tasks import from_log as project_mutants
from nano_rl.tasks.from_log import MutantSearch, mutant_tasks
from nano_rl.tasks.task_file import read_tasks
from nano_shared.hidden_checks import CommandChecks
from nano_shared.snapshot import snapshot_directory
from nano_shared.types import Task, Trajectory

PROMPT, CHECK = "The tests fail. Find the bug and fix it.", "python test_it.py"
RIGHT = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return a * 2\n"
TESTS = "from {0} import add, double\n\nassert add(2, 3) == 5\nassert double(4) == 8\n"


def project(module: str = "calc", **more: str) -> dict[str, str]:
    """A module whose `add` is wrong, and its tests."""
    wrong = RIGHT.replace("a + b", "a - b")
    return {f"{module}.py": wrong, "test_it.py": TESTS.format(module), **more}


def mended(module: str = "calc") -> str:
    return act("edit_file", path=f"{module}.py", line=2, new="    return a + b")


def a_run(runtime: Runtime, files: dict[str, str], *, key: str = "t", **changes: Any) -> Trajectory:
    usual = {"key": key, "prompt": PROMPT, "check": CHECK, "limits": limits()}
    run = grade_run(run_task(a_task(files=files, **(usual | changes)), runtime, seed=1), runtime)
    return runtime.store.get(run.id)


def passing(folder: Path, files: dict[str, str] | None = None, **changes: Any) -> tuple[Trajectory, Runtime]:
    runtime = a_runtime(folder, [mended(), SUBMIT])
    run = a_run(runtime, files or project(), **changes)
    assert run.reward == 1
    return run, runtime


def made(run: Trajectory, runtime: Runtime, count: int = 20, **options: Any) -> tuple[list[Task], str]:
    search = MutantSearch(count=count, **{"seed": 0} | options)
    return mutant_tasks([run], search, runtime.store.blobs, runtime.sandbox)


def changed_lines(tasks: list[Task], path: str = "calc.py") -> list[str]:
    """What stands in each task in place of the right line."""
    found = []
    for task in tasks:
        now, right = task.files[path].split("\n"), RIGHT.split("\n")
        (line,) = [new for new, old in zip(now, right, strict=True) if new != old]
        found.append(line.strip())
    return found


def line_put_back(task: Task) -> Any:
    (edit,) = [action for action in task.oracle or () if action.name == "edit_file"]
    return edit.arguments["line"]


def test_a_mutant_that_the_check_kills_is_a_task_that_its_oracle_solves(tmp_path: Path) -> None:
    run, runtime = passing(tmp_path)
    tasks, report = made(run, runtime)
    # the bug that the run mended, a - b, is not made again; a * 3 and the like are
    lines = changed_lines(tasks)
    assert set(lines) >= {"return a * b", "return a + 2", "return a * 1", "return a * 3"}
    assert "return a - b" not in lines
    assert len(lines) == len(set(lines))
    assert f"{len(tasks)} kept of 20 wanted and {len(tasks)} tried; " in report
    for task in (tasks[0], tasks[-1]):
        assert (task.check, task.files["test_it.py"]) == (CHECK, TESTS.format("calc"))
        assert check_task(task, runtime).checks == {
            "checks": "pass", "oracle": "pass", "leaks": "pass", "starter": "pass", "no_op": "pass",
            "mutants": "skip: a check of kind command has no program to mutate", "repeats": "pass",
        }  # fmt: skip


@pytest.mark.slow
def test_the_seed_decides_which_are_made_and_functions_come_in_turn(tmp_path: Path) -> None:
    run, runtime = passing(tmp_path)
    first, _ = made(run, runtime, 2)
    assert first == made(run, runtime, 2)[0]
    assert {2, 6} == {line_put_back(task) for task in first}
    every = [changed_lines(made(run, runtime, 2, seed=seed)[0]) for seed in range(4)]
    assert any(lines != every[0] for lines in every)


@pytest.mark.slow
def test_an_oracle_looks_before_it_edits_and_quotes_what_is_wrong(tmp_path: Path) -> None:
    files = project()
    files["test_it.py"] = (
        "from calc import add, double\n\n"
        "def test_add():\n    assert add(2, 3) == 5\n\ndef test_double():\n    assert double(4) == 8\n"
    )
    check = "python -m pytest -q test_it.py"
    tasks, _ = made(*passing(tmp_path, files, check=check))
    (task,) = [task for task in tasks if "return a * 3" in task.files["calc.py"]]
    shell, read, edit, submit = task.oracle or ()
    assert (shell.name, shell.arguments) == ("shell", {"command": check})
    assert (read.name, read.arguments) == ("read_file", {"path": "calc.py"})
    assert edit.thought == "test_double fails.\n5|def double(a):\nWrong:\n6|    return a * 3"
    assert edit.arguments == {"path": "calc.py", "line": 6, "new": "    return a * 2"}
    assert submit.name == "submit"


@pytest.mark.slow
def test_an_oracle_uses_the_tools_of_the_run_and_no_hidden_check(tmp_path: Path) -> None:
    few = ("edit_file", "submit")
    tasks, _ = made(*passing(tmp_path / "few", tools=few), 1)
    assert [action.name for action in tasks[0].oracle or ()] == [*few]
    hidden = CommandChecks(command=CHECK, files={"test_it.py": TESTS.format("calc")})
    run, runtime = passing(tmp_path / "hidden", check=None, hidden=hidden)
    (task,) = made(run, runtime, 1)[0]
    assert [action.name for action in task.oracle or ()] == ["read_file", "edit_file", "submit"]


@pytest.mark.slow
def test_what_the_check_passes_or_never_ends_on_is_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_mutants, "_MORE", 1.0)
    unseen, loop = "def unseen(a):\n    return a + 1\n", "    while n > 0:\n        n -= 1\n    return n\n"
    files = project()
    files["calc.py"] += f"\n\n{unseen}\n\ndef count(n):\n{loop}"
    files["test_it.py"] = (
        files["test_it.py"].replace("double\n", "count, double\n") + "assert count(3) == 0\n"
    )
    run, runtime = passing(tmp_path, files)
    tasks, report = made(run, runtime, 30)
    texts = [task.files["calc.py"] for task in tasks]
    assert not any("return a - 1" in text or "return a + 0" in text for text in texts)  # unseen(): survives
    assert not any("n += 1" in text for text in texts)  # never ends
    assert any("while n > 1" in text for text in texts)
    assert "pass the check" in report
    assert "do not end in time" in report


def test_tests_settings_and_what_the_check_does_not_read_are_left_alone(tmp_path: Path) -> None:
    other = "def other(a):\n    return a + 1\n"
    files = project(**{"apart.py": other, "conftest.py": other, "tests/helper.py": other})
    tasks, _ = made(*passing(tmp_path, files))
    assert tasks
    for task in tasks:
        assert {path: task.files[path] for path in files if path != "calc.py"} == {
            path: text for path, text in files.items() if path != "calc.py"
        }


def test_what_a_run_did_to_the_tests_is_not_taken_over(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [mended(), act("write_file", path="test_it.py", content="pass\n"), SUBMIT])
    run = a_run(runtime, project())
    tasks, _ = made(run, runtime)
    assert {task.files["test_it.py"] for task in tasks} == {TESTS.format("calc")}


def test_files_of_held_out_tasks_are_left_out(tmp_path: Path) -> None:
    run, runtime = passing(tmp_path)
    held = RIGHT.replace("a * 2", "a * 3")
    tasks, report = made(run, runtime, held_out={held})
    assert "return a * 3" not in changed_lines(tasks)
    assert "1 are in held-out tasks" in report


@pytest.mark.slow
def test_only_the_words_of_several_different_works_are_said_of_a_mutant(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [mended(), SUBMIT, mended("sums"), SUBMIT])
    one, other = a_run(runtime, project()), a_run(runtime, project("sums"), key="u")
    blobs, jail = runtime.store.blobs, runtime.sandbox
    both, report = mutant_tasks([one, other], MutantSearch(count=4, seed=0), blobs, jail)
    assert "2 passing runs" in report
    assert {task.prompt for task in both} == {PROMPT}
    assert len({next(iter(sorted(task.files))) for task in both}) == 2
    # of one run nobody knows whether its words describe the very bug, nor of two that changed one file
    for runs in ([one], [one, one.model_copy(update={"id": "again"})]):
        alone, _ = mutant_tasks(runs, MutantSearch(count=1, seed=0), blobs, jail)
        assert [task.prompt for task in alone] == ["`python test_it.py` fails. Find the bug and fix it."]


def test_a_hidden_check_decides_and_is_not_shown(tmp_path: Path) -> None:
    files = project()
    tests = {"test_it.py": files.pop("test_it.py")}
    hidden = CommandChecks(command=CHECK, files=tests)
    tasks, _ = made(*passing(tmp_path, files, check=None, hidden=hidden), 2)
    assert [task.prompt for task in tasks] == ["A hidden check fails. Find the bug and fix it."] * 2
    assert all(task.hidden == hidden and list(task.files) == ["calc.py"] for task in tasks)


def test_a_workspace_that_text_cannot_hold_stays_in_the_blobs(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in project().items():
        (folder / name).write_text(text)
    (folder / "data.bin").write_bytes(b"\xff\x00")
    runtime = a_runtime(tmp_path, [mended(), SUBMIT])
    run = a_run(runtime, {}, snapshot=snapshot_directory(folder, runtime.store.blobs))
    (task,), _ = made(run, runtime, 1)
    assert task.snapshot
    assert task.files == {}
    assert check_task(task, runtime).admitted


def test_runs_that_show_no_right_project_give_none(tmp_path: Path) -> None:
    runtime = a_runtime(tmp_path, [SUBMIT, mended(), SUBMIT])
    failed = a_run(runtime, project())
    assert made(failed, runtime)[0] == []
    unchecked = a_run(runtime, project(), check=None)
    assert made(unchecked, runtime)[0] == []
    (task,), _ = made(*passing(tmp_path / "other"), 1)
    again = passing(tmp_path / "third")[0].model_copy(update={"task": task})
    assert made(again, runtime)[0] == []  # a run of a mutant: mutants of mutants would be two bugs away


def nano(*arguments: str) -> Any:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_from_log_writes_mutants_beside_the_logged_task(tmp_path: Path) -> None:
    run, _ = passing(tmp_path)
    log, out = str(tmp_path / "log.db"), tmp_path / "tasks.jsonl"
    done = nano("tasks", "from-log", run.id, "--mutants", "2", "--json", "-o", str(out), "--log", log)
    assert json.loads(done.stdout)["mutants"] == 2
    assert [task.key.partition("-")[0] for task in read_tasks(out)] == ["log", "mutant", "mutant"]
    done = nano("tasks", "from-log", run.id, "--mutants", "1", "--check", "test -e calc.py", "--log", log)
    assert "0 kept of 1 wanted" in done.stderr  # that check passes whatever a function does
    assert len(done.stdout.splitlines()) == 1


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Trains a tiny policy from a log with one passing run; says how often mutants were made."""
    monkeypatch.setenv("NANO_HOME", str(tmp_path))
    monkeypatch.delenv("NANO_LOG", raising=False)
    run, runtime = passing(tmp_path, limits=limits(max_turns=2))
    runtime.store.close()
    model = tiny_model(tmp_path / "tiny", max_positions=512, tasks=[run.task])

    def train(*arguments: str) -> Any:
        usual = ["--model", str(model), "--from-logs", "--fresh", "2", "--prompts", "4", "--lora-rank", "0"]
        patient = ["--set", "guards.patience=99", "--limit", "max_completion_tokens=8"]
        return nano("train", "--name", "mine", *usual, *patient, *arguments)

    return train


@pytest.mark.slow
def test_a_training_from_logs_rolls_out_mutants_and_resumes_with_the_same(
    tmp_path: Path, logged: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = logged("--steps", "1", "--set", "logs.mutants=3")
    assert done.exit_code == 0, done.output
    assert "mutants: making up to 3 more tasks of what 1 passing runs left, for at most 300 s" in done.stderr
    assert "3 kept of 3 wanted" in done.stderr
    assert "environments: 1 logged tasks and 3 mutants; at most 8 fresh rollouts (1 steps of 4" in done.stderr
    folder = tmp_path / "trainings" / "mine"
    file = folder / "mutants.jsonl"
    first = file.read_bytes()
    keys = {task.key for task in read_tasks(file)}
    with a_runtime(tmp_path).store as log:
        ran = [run.task.key for run in log.trajectories()]
    assert {key: ran.count(key) for key in keys} == dict.fromkeys(keys, 3)  # the oracle's too
    assert "imitated beside (lambda_sft 1): 3 of 3 mutants, mended" in done.stderr

    def again(*_: Any, **__: Any) -> None:
        raise AssertionError("mutants were made again")

    monkeypatch.setattr(project_mutants, "mutant_tasks", again)
    (tmp_path / "checkpoints" / "mine").rename(tmp_path / "first")
    done = logged("--steps", "2", "--resume", "--set", "logs.mutants=3")
    assert done.exit_code == 0, done.output
    assert file.read_bytes() == first
    assert [row["tasks"] for row in read_metrics(folder / METRICS)] == [4, 4]


def test_no_mutants_are_made_where_they_are_turned_off(tmp_path: Path, logged: Callable[..., Any]) -> None:
    done = logged("--steps", "1", "--set", "logs.mutants=0")
    assert done.exit_code == 0, done.output
    assert "mutants" not in done.stderr
    assert not (tmp_path / "trainings" / "mine" / "mutants.jsonl").exists()
    assert "environments: 1 logged tasks; " in done.stderr


@pytest.mark.slow
def test_mutants_of_another_log_can_be_rolled_out_into_the_first(
    tmp_path: Path, logged: Callable[..., Any]
) -> None:
    (mine := tmp_path / "mine").mkdir()
    a_runtime(mine).store.close()
    both = ("--log", str(mine / "log.db"), "--log", str(tmp_path / "log.db"))
    done = logged("--steps", "1", "--set", "logs.mutants=3", *both)
    assert done.exit_code == 0, done.output
    keys = {task.key for task in read_tasks(tmp_path / "trainings" / "mine" / "mutants.jsonl")}
    with a_runtime(mine).store as log:
        assert keys <= {run.task.key for run in log.trajectories()}
