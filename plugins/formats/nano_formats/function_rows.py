"""HumanEval and MBPP rows as their authors publish them, and plain rows of functions."""

from __future__ import annotations

import ast
from typing import Any

from pydantic import JsonValue

from nano_formats.published_rows import PublishedRow
from nano_formats.row_format import RowFormat
from nano_rl.tasks.task_file import read_row
from nano_shared.errors import Refused
from nano_shared.hidden_checks import AnswerChecks, CaseChecks, SuiteChecks
from nano_shared.process import parse
from nano_shared.strict_json import Row, text_field, to_json, validated
from nano_shared.types import Task

NAME = "rows"


def read_published(row: Row) -> Task:
    """The task of a row with `tests` or `cases`. Raises Refused."""
    return read_row(to_json(row))


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
    name=NAME, summary="a function and its cases, or a row of the published sets with its tests",
    recognises=lambda row: "id" in row and ("cases" in row or "tests" in row), read_row=read_published,
    write_row=write_published, understood=frozenset({*PublishedRow.model_fields, "cases"}),
)  # fmt: skip


_FILE, _TEST = "solution.py", "check_solution.py"


def read_humaneval(row: Row) -> Task:
    prompt, name = text_field(row, "prompt"), _name(row)
    imports = f"from solution import *\nfrom solution import {name}"
    test = f"{imports}\n\n{text_field(row, 'test')}\n\ncheck({name})\n"
    body = row.get("canonical_solution")
    solution = prompt + body if isinstance(body, str) and body.strip() else None
    return _task(row, "humaneval", prompt, name, test, solution, {_FILE: prompt})


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


def _task(
    row: Row, source: str, prompt: str, name: str, test: str, solution: str | None, files: dict[str, str]
) -> Task:
    published = {
        "id": _id(row, source), "source": source, "kind": "implement", "prompt": prompt,
        "entry_point": name, "files": files, "target": _FILE, "reference_solution": solution,
        "tests": {"runner": "script", "files": {_TEST: test}},
    }  # fmt: skip
    return validated(PublishedRow, published).task()


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


def _texts(row: Row, field: str, *, required: bool = False) -> list[str]:
    texts = row.get(field) or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(field, "must be a list of texts")
    if required and not texts:
        raise Refused(field, "is missing" if field not in row else "is empty")
    return texts


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


HUMANEVAL = RowFormat(
    name="humaneval", summary="HumanEval rows: prompt, entry_point, canonical_solution, test",
    recognises=lambda row: {"task_id", "entry_point", "test"} <= row.keys(), read_row=read_humaneval,
)  # fmt: skip
MBPP = RowFormat(
    name="mbpp", summary="MBPP rows: text or prompt, code, test_list",
    recognises=lambda row: {"task_id", "code", "test_list"} <= row.keys(), read_row=read_mbpp,
)  # fmt: skip
