"""`nano-rl grade RUN...`: logged runs are graded again from the log, beside the verdicts that they have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.main import get_command

from nano_coder.grading.grade import GRADERS
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_rl.cli import cli
from nano_shared.errors import LogError, UsageError
from nano_shared.hidden_checks import Case, CaseChecks, HiddenChecks
from nano_shared.store import LogStore
from nano_shared.types import Task

CASES = (Case(args=[1], expected=2), Case(args=[5], expected=6), Case(args=[0], expected=0))
HIDDEN = CaseChecks(entry_point="add", cases=CASES)
SCRIPT = ["@write_file path=a.py\ndef add(x):\n    return x + 1\n", "@submit"]


def _logged(path: Path, hidden: HiddenChecks | None = HIDDEN) -> str:
    """The id of a run that was executed and graded."""
    with LogStore.open(path) as store:
        runtime = Runtime(policy=ScriptedPolicy(SCRIPT), sandbox=open_sandbox(), store=store)
        task = Task(key="k", prompt="p", files={"a.py": ""}, artifacts=("a.py",), hidden=hidden)
        return grade_run(run_task(task, runtime), runtime).id


def _grade(*arguments: str) -> int:
    return int(get_command(cli).main(["grade", *arguments], standalone_mode=False))


def test_verdicts_of_several_graders_stand_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.db"
    run = _logged(log)
    assert _grade(run, "--log", str(log)) == 0
    assert _grade(run, "--log", str(log), "--grader", "fraction", "--json") == 0
    out = capsys.readouterr().out
    told = json.loads(out.splitlines()[-1])
    assert (told["run"], told["reward"]) == (run, pytest.approx(2 / 3))
    assert [old["reward"] for old in told["before"]] == [0.0, 0.0]
    with LogStore.open(log) as store:
        verdicts = store.verdicts(run)
        assert [v.grader for v in verdicts] == [*[next(iter(GRADERS))] * 2, told["grader"]]
        assert len({v.graded_hash for v in verdicts}) == 1
        assert store.get(run).reward == pytest.approx(2 / 3)
        assert len(store.get(run).turns) == 2  # nothing was executed again


def test_what_cannot_be_graded_is_refused_in_a_sentence(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    unchecked = _logged(tmp_path / "log.db", None)
    with pytest.raises(UsageError, match="has no check"):
        _grade(unchecked, "--log", log)
    with pytest.raises(LogError, match="no run 'nothing'"):
        _grade("nothing", "--log", log)
    with pytest.raises(UsageError, match="unknown grader 'mine'"):
        _grade(unchecked, "--log", log, "--grader", "mine")
    with pytest.raises(UsageError, match="leave out --task"):
        _grade(unchecked, "--log", log, "--task", "x.jsonl")


def test_a_folder_that_cannot_be_graded_is_refused_in_a_sentence(tmp_path: Path) -> None:
    tasks = tmp_path / "t#1.jsonl"
    rows = [
        {"id": key, "prompt": "p", "entry_point": "f", "cases": [{"args": [], "expected": 1}]} for key in "ab"
    ]
    tasks.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UsageError, match="no such folder"):
        _grade("--task", str(tasks), "--workspace", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="holds 2 tasks; name one"):
        _grade("--task", str(tasks), "--workspace", str(tmp_path))
    with pytest.raises(UsageError, match="holds no task 'c'; it holds a, b"):
        _grade("--task", f"{tasks}#c", "--workspace", str(tmp_path))
    with pytest.raises(UsageError, match="no such task file"):
        _grade("--task", str(tmp_path / "none.jsonl"), "--workspace", str(tmp_path))
    with pytest.raises(UsageError, match="name runs of the log, or a folder"):
        _grade()
