"""End states: files that the agent left, compared with expected texts, JSON, CSV, SQLite rows and the answer.

The grader reads the bytes itself. A database is opened by a program of ours in a jail, since an agent's file
may be crafted to harm its reader; expected values never enter the jail.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

from nano_coder.grading.hidden_cases import NUMBER, GradingOutcome, Submission, same, same_answer
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError
from nano_shared.hidden_checks import SQLITE_SIBLINGS, StateCheck, StateChecks
from nano_shared.types import Limits, Tampering

LARGEST_STATE = 16 << 20
"""bytes of a compared file"""
_QUERY = Path(__file__).with_name("query.py").read_text(encoding="utf-8")
_SECONDS = 20.0


class Unreadable(Exception):
    """The file does not have the required format."""


def grade_state(given: Submission) -> GradingOutcome:
    """Compare the end state. Raises SandboxError for our failures."""
    hidden, files, answer = given.checks, given.files, given.answer
    assert isinstance(hidden, StateChecks)
    checks: dict[str, str] = {}
    tampering: list[Tampering] = []
    kind = None
    for number, check in enumerate(hidden.state, start=1):
        path = str(check.path)
        if check.kind == "answer":
            state = "pass" if same_answer(answer, check.expected) else "fail"
            kind = kind or ("no_answer" if answer is None else None)
        elif check.kind == "absent":
            state = "fail" if path in files or path in given.others else "pass"
        elif path not in files:
            state, kind = "error", kind or "no_artifact"
        else:
            try:
                state = "pass" if _holds(check, files, given.task.limits, given.sandbox) else "fail"
            except Unreadable:
                state = "error"
        checks[f"state_{number}"] = state
    return GradingOutcome(checks, tuple(tampering), kind)


def _holds(check: StateCheck, files: Mapping[str, bytes], limits: Limits, sandbox: Sandbox) -> bool:
    data = files[str(check.path)]
    if len(data) > LARGEST_STATE:
        raise Unreadable(f"{len(data)} bytes")
    if check.kind == "sql":
        return _same_rows(_rows_of_query(check, files, limits, sandbox), check, same)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise Unreadable(str(problem)) from None
    if check.kind == "text":
        # editors differ in whether they end a file with a newline
        return text.replace("\r\n", "\n").rstrip("\n") == str(check.expected).rstrip("\n")
    if check.kind == "json":
        return same(read_json(text), check.expected)
    return _same_rows(_rows_of_csv(text, check.expected), check, _same_cells)


def read_json(text: str) -> Any:
    """Raises Unreadable for invalid JSON, NaN, a repeated key, and endless nesting."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise Unreadable("a key stands twice")
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise Unreadable(f"{name} is no JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        raise Unreadable(str(problem)) from None


def _rows_of_csv(text: str, expected: Any) -> list[Any]:
    """Rows of cells; or dictionaries by column name, if the expected rows are dictionaries."""
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except csv.Error as problem:
        raise Unreadable(str(problem)) from None
    if not (isinstance(expected, list) and any(isinstance(row, dict) for row in expected)):
        return list(rows)
    if not rows or len(set(rows[0])) != len(rows[0]) or any(len(row) != len(rows[0]) for row in rows):
        raise Unreadable("its rows do not match its header")
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def _same_cells(given: Any, expected: Any) -> bool:
    """Texts against values: a number equals the text that spells it, null an empty text."""
    if isinstance(expected, list) and isinstance(given, list):
        return len(given) == len(expected) and all(map(_same_cells, given, expected))
    if isinstance(expected, dict) and isinstance(given, dict):
        return given.keys() == expected.keys() and all(_same_cells(given[k], expected[k]) for k in expected)
    if not isinstance(given, str):
        return False
    if isinstance(expected, bool):
        return given in (str(expected), str(expected).lower(), str(expected).upper())
    if isinstance(expected, int | float):
        return _same_number(given, expected)
    return given == ("" if expected is None else expected)


def _same_number(text: str, expected: float) -> bool:
    """Equality of numbers of any length; a fraction may have as many digits as its float needs."""
    if not NUMBER.fullmatch(text):
        return False
    exact = Decimal(text)
    if isinstance(expected, int) or exact == exact.to_integral_value():
        return exact == expected
    return float(text) == expected


def _same_rows(given: list[Any], check: StateCheck, equal: Any) -> bool:
    expected = check.expected
    if not isinstance(expected, list) or len(given) != len(expected):
        return False
    if check.ordered:
        return all(map(equal, given, expected))
    left = list(given)
    for row in expected:
        place = next((i for i, other in enumerate(left) if equal(other, row)), None)
        if place is None:
            return False
        del left[place]
    return True


def _rows_of_query(
    check: StateCheck, files: Mapping[str, bytes], limits: Limits, sandbox: Sandbox
) -> list[Any]:
    with closing(sandbox.open(None, limits)) as jail:
        for end in SQLITE_SIBLINGS:
            if (data := files.get(f"{check.path}{end}")) is not None:
                jail.write(f"state.db{end}", data)
        job = json.dumps({"path": "/work/state.db", "query": check.query}).encode()
        result = jail.run_python(
            _QUERY, isolated=True, stdin=job, timeout=_SECONDS, output_bytes=LARGEST_STATE
        )
    try:
        report = json.loads(result.stdout)
    except ValueError:
        if result.timed_out or result.signal is not None or result.truncated or result.oom:
            raise Unreadable("the database could not be queried") from None
        raise SandboxError(f"the query program failed: {result.stderr[-300:]!r}") from None
    if "rows" not in report:
        raise Unreadable(str(report.get("problem")))
    return list(report["rows"])
