"""HumanEval, MBPP and EvalPlus rows as their authors publish them, and plain rows of functions."""

from __future__ import annotations

import ast
from typing import Any

from pydantic import JsonValue

from nano_rl.formats import RowFormat
from nano_rl.tasks.task_file import OpenRow, read_row
from nano_shared.errors import Refused
from nano_shared.hidden_checks import AnswerChecks, CaseChecks, SuiteChecks
from nano_shared.process import parse
from nano_shared.strict_json import Row, text_field, to_json, validated
from nano_shared.types import Task

NAME = "rows"


def read_published(row: Row) -> Task:
    """The task of a row with `tests` or `cases`. Raises Refused as `published_rows.read_row`."""
    return read_row(to_json(row))


def open_task(row: Row) -> Task:
    """The task of a published row that was made of another format's. Raises Refused."""
    return validated(OpenRow, row).task()


def write_published(task: Task) -> Row:
    """Cases as the plainest row; test files and answers as a published one."""
    hidden = task.hidden
    if not isinstance(hidden, CaseChecks | SuiteChecks | AnswerChecks):
        kind = None if hidden is None else hidden.kind
        raise Refused("hidden.kind", f"{kind!r} is no check of these rows; they have cases, suites, answers")
    row: Row = {"id": task.key, "prompt": task.prompt, "files": task.files}
    if isinstance(hidden, AnswerChecks):
        answer = hidden.answer if isinstance(hidden.answer, str) else repr(hidden.answer)
        tests: dict[str, Any] = {"runner": "literal", "expected": answer}
        return row | {"source": "nano", "kind": "predict-output", "target": "answer", "tests": tests}
    row |= {"target": target(task), "entry_point": hidden.entry_point}
    if isinstance(hidden, CaseChecks):
        return row | {"cases": plain_cases(hidden)}
    tests = {"runner": hidden.suite.framework, "files": hidden.suite.files}
    return row | {"source": "nano", "kind": task.view or "implement", "tests": tests}


def target(task: Task) -> str:
    """The one file that is graded. Raises Refused where there is none, or several."""
    if len(task.artifacts) != 1:
        raise Refused("artifacts", f"{len(task.artifacts)} files are graded; this format has one")
    return task.artifacts[0]


def plain_cases(hidden: CaseChecks) -> list[dict[str, JsonValue]]:
    """The cases as plain JSON. Raises Refused for bounds on the source, which only nano measures."""
    if hidden.metrics:
        raise Refused("hidden.metrics", "bounds on the syntax tree have no field in this format")
    return [{"args": c.args, "kwargs": c.kwargs, "expected": c.expected} for c in hidden.cases]


ROWS = RowFormat(
    name=NAME,
    summary="a function and its cases, or a row of the published sets with its tests",
    recognises=lambda row: "id" in row and ("cases" in row or "tests" in row),
    read_row=read_published,
    write_row=write_published,
    understood=frozenset({*OpenRow.model_fields, "cases"}),
)


_FILE, _TEST = "solution.py", "check_solution.py"
_EVALPLUS = '''"""Compare with the reference on every input, as EvalPlus does."""
import copy
import math

from solution import {name}

SOURCE = {source!r}
INPUTS = {inputs!r}
reference = {{}}
exec(SOURCE, reference)


def same(given, expected, tolerance):
    if isinstance(expected, float) and isinstance(given, (int, float)):
        return math.isclose(given, expected, rel_tol=1e-7, abs_tol=tolerance) or given is expected
    if isinstance(expected, (list, tuple)) and isinstance(given, (list, tuple)):
        return len(given) == len(expected) and all(same(g, e, tolerance) for g, e in zip(given, expected))
    return given == expected


for args in INPUTS:
    expected = reference[{name!r}](*copy.deepcopy(args))
    assert same({name}(*copy.deepcopy(args)), expected, {tolerance!r})
'''


def read_humaneval(row: Row) -> Task:
    prompt, name = text_field(row, "prompt"), _name(row)
    test = (
        f"from solution import *\nfrom solution import {name}\n\n{text_field(row, 'test')}\n\ncheck({name})\n"
    )
    return _task(row, "humaneval", prompt, name, test, _solution(row, prompt), {_FILE: prompt})


def read_mbpp(row: Row) -> Task:
    asserts = _texts(row, "test_list", required=True)
    code = text_field(row, "code")
    name = _called(asserts[0], code)
    text = text_field(row, "text" if "text" in row else "prompt")
    prompt = f"{text.strip()}\nYour code should pass this test:\n{asserts[0]}"
    setup = [*_texts(row, "test_imports"), row.get("test_setup_code") or ""]
    challenge = _texts(row, "challenge_test_list")
    test = "\n".join(["from solution import *", *setup, "", *asserts, *challenge, ""])
    return _task(row, "mbpp", prompt, name, test, code, {})


def read_evalplus(row: Row) -> Task:
    prompt, name = text_field(row, "prompt"), _name(row)
    reference = _solution(row, prompt)
    inputs = [args for field in ("base_input", "plus_input") for args in _inputs(row, field)]
    if not inputs:
        raise Refused("base_input", "holds no input to compare on")
    tolerance = row.get("atol") or 0
    if not isinstance(tolerance, int | float):
        raise Refused("atol", "must be a number")
    test = _EVALPLUS.format(name=name, source=reference, inputs=inputs, tolerance=float(tolerance))
    files = {_FILE: prompt} if f"def {name}(" in prompt else {}
    return _task(row, "evalplus", prompt, name, test, reference, files)


def write_humaneval(task: Task) -> Row:
    """A function with cases; its tests become one assertion a case."""
    hidden = _cases(task)
    asserts = [f"    assert candidate({_call(c)}) == {c['expected']!r}" for c in plain_cases(hidden)]
    return {
        "task_id": task.key,
        "prompt": task.files.get(target(task), task.prompt),
        "entry_point": hidden.entry_point,
        "canonical_solution": "",
        "test": "\n".join(["def check(candidate):", *asserts, ""]),
    }


def write_mbpp(task: Task) -> Row:
    hidden = _cases(task)
    return {
        "task_id": task.key,
        "text": task.prompt,
        "code": task.files.get(target(task), ""),
        "test_setup_code": "",
        "test_list": [
            f"assert {hidden.entry_point}({_call(c)}) == {c['expected']!r}" for c in plain_cases(hidden)
        ],
        "challenge_test_list": [],
    }


def _task(
    row: Row, source: str, prompt: str, name: str, test: str, solution: str | None, files: dict[str, str]
) -> Task:
    return open_task(
        {
            "id": _id(row, source), "source": source, "kind": "implement", "prompt": prompt,
            "entry_point": name, "files": files, "target": _FILE,
            "tests": {"runner": "script", "files": {_TEST: test}}, "reference_solution": solution,
        }
    )  # fmt: skip


def _id(row: Row, source: str) -> str:
    number = row.get("task_id")
    if isinstance(number, bool) or not isinstance(number, str | int) or number == "":
        raise Refused("task_id", "is missing" if number is None else "must be text or a number")
    return number if isinstance(number, str) else f"{source}/{number}"


def _name(row: Row) -> str:
    name = text_field(row, "entry_point")
    if not name.isidentifier():
        raise Refused("entry_point", f"{name!r:.60} is no name of a function")
    return name


def _solution(row: Row, prompt: str) -> str | None:
    body = row.get("canonical_solution")
    if not isinstance(body, str) or not body.strip():
        return None
    return prompt + body


def _texts(row: Row, field: str, *, required: bool = False) -> list[str]:
    texts = row.get(field) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(field, "must be a list of texts")
    if required and not texts:
        raise Refused(field, "is missing" if field not in row else "is empty")
    return texts


def _inputs(row: Row, field: str) -> list[list[object]]:
    inputs = row.get(field) or []
    if not isinstance(inputs, list) or not all(isinstance(args, list) for args in inputs):
        raise Refused(field, "must be a list of lists of arguments")
    return inputs


def _called(test: str, code: str) -> str:
    """The function of `code` that a test calls. Raises Refused where there is none."""
    try:
        defined = {node.name for node in parse(code).body if isinstance(node, ast.FunctionDef)}
        used = [node.id for node in ast.walk(parse(test)) if isinstance(node, ast.Name)]
    except SyntaxError as problem:
        raise Refused("code", f"or test_list is no Python: {problem}") from None
    found = [name for name in used if name in defined]
    if not found:
        raise Refused("test_list.0", "calls no function that `code` defines")
    return found[0]


def _cases(task: Task) -> CaseChecks:
    if not isinstance(task.hidden, CaseChecks):
        kind = None if task.hidden is None else task.hidden.kind
        raise Refused(
            "hidden.kind", f"{kind!r} has no form in these rows; they hold a function and its cases"
        )
    return task.hidden


def _call(case: Row) -> str:
    given = [repr(value) for value in case["args"]]
    return ", ".join([*given, *(f"{key}={value!r}" for key, value in case["kwargs"].items())])


_SHARED = frozenset({"task_id", "prompt", "entry_point", "canonical_solution", "test"})
HUMANEVAL = RowFormat(
    name="humaneval",
    summary="HumanEval rows: prompt, entry_point, canonical_solution, test",
    recognises=lambda row: {"task_id", "entry_point", "test"} <= row.keys(),
    read_row=read_humaneval,
    write_row=write_humaneval,
    understood=_SHARED,
)
MBPP = RowFormat(
    name="mbpp",
    summary="MBPP rows: text or prompt, code, test_list",
    recognises=lambda row: {"task_id", "code", "test_list"} <= row.keys(),
    read_row=read_mbpp,
    write_row=write_mbpp,
    understood=frozenset({"task_id", "text", "prompt", "code", "test_list", "challenge_test_list"}),
)
EVALPLUS = RowFormat(
    name="evalplus",
    summary="EvalPlus rows: prompt, entry_point, canonical_solution, base_input, plus_input",
    recognises=lambda row: {"task_id", "entry_point", "base_input"} <= row.keys(),
    read_row=read_evalplus,
    understood=_SHARED | {"base_input", "plus_input", "atol"},
)
