"""Python source as a syntax tree."""

from __future__ import annotations

import ast
import threading

_ONE_AT_A_TIME = threading.Lock()


def parse(source: str | bytes) -> ast.Module:
    """`ast.parse`, for threads: CPython counts the depth of all trees that are made at once together, and two
    of them at the wrong moment are a SystemError (python/cpython#106905)."""
    with _ONE_AT_A_TIME:
        return ast.parse(source)


def parse_expression(source: str) -> ast.Expression:
    """`ast.parse` of an expression, for threads."""
    with _ONE_AT_A_TIME:
        return ast.parse(source, mode="eval")
