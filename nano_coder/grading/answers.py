"""Answers: equal by exact plain types, as a text or a literal."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from typing import Any

from nano_shared.process import parse_expression

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""a number as JSON writes it; no other spelling is accepted"""
_LONGEST = 100_000
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.]+|\s+|.""", re.DOTALL)


def same(given: Any, expected: Any) -> bool:
    """Equal in value and exact type, recursively: True is not 1, 1 is not 1.0, NaN equals nothing."""
    if type(given) is not type(expected):
        return False
    if isinstance(expected, list):
        return len(given) == len(expected) and all(map(same, given, expected))
    if isinstance(expected, dict):
        return given.keys() == expected.keys() and all(same(given[key], expected[key]) for key in expected)
    return bool(given == expected)


def same_answer(text: str | None, expected: Any) -> bool:
    """Whether a submitted text gives the expected value.

    No answer is never right. If a text is expected, texts are compared, ignoring blanks and quotes around
    them and, in a bracketed text, blanks between items and the kind of quotes. Any other value is read from
    JSON or a Python literal, with numbers spelt as JSON spells them: an answer must not be the question in
    another notation.
    """
    if text is None:
        return False
    if isinstance(expected, str):
        return _parts(text) == _parts(expected)
    return any(same(reading, expected) for reading in _readings(text.strip()))


def _parts(text: str) -> list[str]:
    """A text without blanks and quotes around it; a bracketed one as a list of its tokens."""
    text = text.strip()
    if text[:1] in "([{" and text[-1:] in ")]}" and 2 <= len(text) <= _LONGEST:
        return [_unquoted(token) for token in _TOKEN.findall(text) if not token.isspace()]
    return [_without_quotes(text).strip()]


def _unquoted(token: str) -> str:
    """A quoted token as a mark and its text, so that it differs from the same token without quotes."""
    inner = _without_quotes(token)
    return token if inner == token else f"'{inner}"


def _without_quotes(text: str) -> str:
    if len(text) < 2 or text[0] not in "'\"" or text[0] != text[-1]:
        return text
    # only escaped quotes are undone: any other escape is part of the text
    return re.sub(r"\\(.)", lambda m: m[1] if m[1] in "'\"" else m[0], text[1:-1], flags=re.DOTALL)


def _readings(text: str) -> list[Any]:
    """The values that a text spells as JSON and as a Python literal (tuples as lists)."""
    readings: list[Any] = []
    if len(text) > _LONGEST or not _plainly_spelt(text):
        return readings
    with suppress(ValueError, RecursionError):
        readings.append(json.loads(text))
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        readings.append(_lists(ast.literal_eval(parse_expression(text.lstrip(" \t")))))
    return readings


def _plainly_spelt(text: str) -> bool:
    """Whether every number outside quotes is spelt as JSON spells it."""
    before = ""
    for token in _TOKEN.findall(text):
        if token == "+" and not _SCALED.fullmatch(before):
            return False
        before = token
        known = token.isalpha() or NUMBER.fullmatch(token) or _SCALED.fullmatch(token)
        if re.match(r"[\w.]", token) and not known:
            return False
    return True


_SCALED = re.compile(r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE]")
"""the part of 1e-5 that `_TOKEN` matches before the sign"""


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
