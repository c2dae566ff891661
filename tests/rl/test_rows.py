"""Published rows become tasks as they are; a malformed one is refused by its place and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nano_rl.tasks.task_file import read_tasks, write_tasks
from nano_shared.errors import UsageError
from nano_shared.hidden_checks import AnswerChecks, CaseChecks, SuiteChecks
from nano_shared.types import Task

PLAIN = {
    "id": "p/1", "prompt": "Add.", "target": "sol.py", "entry_point": "add",
    "cases": [{"args": [1, 2], "kwargs": {}, "expected": 3}], "files": {"data.txt": "x"},
}  # fmt: skip
SCRIPT = {
    "id": "s/1", "source": "set", "source_commit": "c", "licence": "MIT", "attribution": "a",
    "kind": "implement",
    "split": "open", "split_hint": "train", "prompt": "Write f.", "entry_point": "f", "files": {},
    "target": "solution.py", "reference_solution": "def f(x):\n    return x\n", "meta": {"n": 1},
    "tests": {"runner": "script", "files": {"check.py": "from solution import *\nassert f(1) == 1\n"},
              "cmd": ["python", "check.py"], "visible_files": {"seen.py": "from solution import f\n"}},
}  # fmt: skip
LITERAL = {
    **SCRIPT, "id": "l/1", "kind": "predict-output", "target": "answer", "reference_solution": "[(1, 2)]",
    "tests": {"runner": "literal", "expected": "[(1, 2)]", "input": "1"},
}  # fmt: skip


def _read(folder: Path, *rows: Any) -> list[Task]:
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
    return read_tasks(path)


def test_the_plainest_row_is_a_task_of_cases(tmp_path: Path) -> None:
    (task,) = _read(tmp_path, PLAIN)
    assert isinstance(task.hidden, CaseChecks)
    assert (task.key, task.artifacts, task.files) == ("p/1", ("sol.py",), {"data.txt": "x"})
    assert task.hidden.entry_point == "add"
    assert task.hidden.cases[0].expected == 3
    assert "sol.py" in task.prompt


def test_a_published_row_hides_its_tests_and_shows_what_it_calls_visible(tmp_path: Path) -> None:
    (task,) = _read(tmp_path, SCRIPT)
    assert isinstance(task.hidden, SuiteChecks)
    assert task.hidden.suite.framework == "script"
    assert (task.hidden.suite.names, task.hidden.suite.strict) == (("f",), False)
    assert (task.files, task.check) == ({"seen.py": "from solution import f\n"}, "python seen.py")
    assert "assert f(1)" not in task.prompt
    assert task.oracle is not None
    assert task.oracle[0].arguments["content"] == SCRIPT["reference_solution"]


def test_an_output_to_predict_is_an_answer(tmp_path: Path) -> None:
    (task,) = _read(tmp_path, LITERAL)
    assert isinstance(task.hidden, AnswerChecks)
    assert (task.hidden.answer, task.artifacts) == ("[(1, 2)]", ())


def test_tests_that_make_objects_of_a_class_of_the_solution_are_strict(tmp_path: Path) -> None:
    tests = {
        "runner": "pytest",
        "files": {"t.py": "from solution import Box\ndef test_it(): assert Box().x\n"},
    }
    row = {**SCRIPT, "entry_point": None, "tests": tests, "reference_solution": "class Box:\n    x = 1\n"}
    error = {**row, "id": "s/2", "reference_solution": "class Box(Exception):\n    x = 1\n"}
    hidden = [task.hidden for task in _read(tmp_path, row, error)]
    assert [checks.suite.strict for checks in hidden if isinstance(checks, SuiteChecks)] == [True, False]


def test_rows_of_several_kinds_share_a_file_and_come_back_as_tasks(tmp_path: Path) -> None:
    tasks = _read(tmp_path, PLAIN, SCRIPT, LITERAL)
    write_tasks(tmp_path / "again.jsonl", tasks)
    assert read_tasks(tmp_path / "again.jsonl") == tasks


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("{nonsense", "row"),
        ("[1]", "row"),
        ({"id": "x", "prompt": "p"}, "cases"),
        ({**PLAIN, "cases": []}, "cases"),
        ({**PLAIN, "case": 1}, "case"),
        ({**PLAIN, "entry_point": None}, "entry_point"),
        ({**PLAIN, "prompt": " "}, "prompt"),
        ({**PLAIN, "files": {"../x": ""}}, "files"),
        ({**PLAIN, "cases": [{"args": [1], "expected": float("nan")}]}, "cases"),
        ({**PLAIN, "target": "../sol.py"}, "target"),
        ({**PLAIN, "target": "./sol.py"}, "target"),
        ({**PLAIN, "target": "/etc/sol.py"}, "target"),
        ({**PLAIN, "entry_point": "not a name"}, "entry_point"),
        ({**PLAIN, "entry_point": "lambda"}, "entry_point"),
        ({"key": "k", "prompt": "p", "artifacts": ["../../sol.py"]}, "artifacts"),
        ('{"id": "x", "id": "y"}', "id"),
        ('{"id": "x", "prompt": "p", "cases": ' + "[" * 5000 + "]" * 5000 + "}", "row"),
        ('{"id": "x", "prompt": "p", "cases": ' + "[" * 800 + "]" * 800 + "}", "row"),
        ({"key": "k", "prompt": "p", "hidden": {"kind": "answer", "answer": float("inf")}}, "hidden"),
        (b"{\xff\xfe}", "row"),
        ({**SCRIPT, "target": "a/../../b"}, "target"),
        ({**SCRIPT, "tests": {"runner": "tox", "files": {}}}, "tests.runner"),
        ({**SCRIPT, "tests": {"runner": "pytest", "files": {}}}, "tests"),
        ({**LITERAL, "tests": {"runner": "literal"}}, "tests"),
        ({k: v for k, v in SCRIPT.items() if k != "target"}, "target"),
    ],
)
def test_a_malformed_row_is_refused_by_line_and_field(tmp_path: Path, row: Any, field: str) -> None:
    with pytest.raises(UsageError, match=rf"rows\.jsonl:2: {field}: "):
        _read(tmp_path, PLAIN, row)


def test_a_reason_is_one_plain_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        _read(tmp_path, {**PLAIN, "cases": [{"args": [1]}]})
    assert str(refused.value).endswith(": cases: case 0 lacks `expected`; null has to be written too")


def test_a_name_is_read_as_python_reads_it(tmp_path: Path) -> None:
    (task,) = _read(tmp_path, {**PLAIN, "entry_point": "\ufb01x_\u00b5"})  # a ligature, a micro sign
    assert isinstance(task.hidden, CaseChecks)
    assert task.hidden.entry_point == "fix_\u03bc"
