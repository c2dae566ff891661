"""Rows of published task sets, and plain rows of a function with cases, as an exchange format."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from nano_rl.formats.row_format import RowFormat
from nano_rl.tasks.benchmark_rows import OpenRow, read_row
from nano_shared.hidden_checks import AnswerChecks, CaseChecks, SuiteChecks
from nano_shared.refusal import Refused
from nano_shared.strict_json import Row, to_json, validated
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
        tests: dict[str, Any] = {"runner": "literal", "expected": _literal(hidden.answer)}
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


def _literal(answer: JsonValue) -> str:
    return answer if isinstance(answer, str) else repr(answer)


ROWS = RowFormat(
    name=NAME,
    summary="a function and its cases, or a row of the published sets with its tests",
    recognises=lambda row: "id" in row and ("cases" in row or "tests" in row),
    read_row=read_published,
    write_row=write_published,
    understood=frozenset({*OpenRow.model_fields, "cases"}),
)
