"""Equality of plain values, type for type: True is not 1, and 1 is not 1.0."""

from __future__ import annotations

from typing import Any


def same_value(actual: Any, expected: Any) -> bool:
    """Whether two JSON values are equal with equal types all the way down."""
    if type(actual) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same_value, actual, expected))
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(same_value(actual[k], expected[k]) for k in expected)
    return bool(actual == expected)
