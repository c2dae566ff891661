"""Equality of answers: exact plain types, and texts read leniently."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from typing import Any


def same(given: Any, expected: Any) -> bool:
    """Equal in value and in exact type, all the way down: True is not 1, 1 is not 1.0, NaN equals nothing."""
    if type(given) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(same(given[key], expected[key]) for key in expected)
    return bool(given == expected)


def same_answer(text: str | None, expected: Any) -> bool:
    """Whether a submitted text gives the expected value: as it stands, or read as JSON or a Python literal.

    No answer is never right. Where a text is expected, quotes around it and blanks outside do not matter.
    """
    if text is None:
        return False
    readings = _readings(text)
    if isinstance(expected, str):
        return any(isinstance(r, str) and r.strip() == expected.strip() for r in readings) or any(
            same(r, e) for r in readings for e in _readings(expected)
        )
    return any(same(reading, expected) for reading in readings)


def _readings(text: str) -> list[Any]:
    """The stripped text, and what it means as JSON and as a Python literal (tuples as lists)."""
    text = text.strip()
    readings: list[Any] = [text]
    if len(text) > 100_000:
        return readings
    with suppress(ValueError, RecursionError):
        readings.append(json.loads(text))
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        readings.append(_lists(ast.literal_eval(text)))
    return readings


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
