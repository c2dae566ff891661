"""Reports: one JSON object a line, with bounded length and depth, read in jails and outside."""

from __future__ import annotations

import json
from typing import Any

LONGEST = 1 << 20
"""characters of one report"""
DEEPEST = 400
"""levels of JSON; a value takes at most three for each level of its own (`value_codec`)"""
LONGEST_NAME = 200
"""characters of a name in a report: the solution chooses class names"""


class Malformed(ValueError):
    """The line is no report."""


def read(line: str, longest: int = LONGEST) -> dict[str, Any]:
    """The report in a line. Raises Malformed, and nothing else."""
    if len(line) > longest:
        raise Malformed("too long")
    try:
        report = json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Malformed(type(error).__name__) from None
    if type(report) is not dict:
        raise Malformed("no object")
    if _too_deep(line, report):
        raise Malformed("nested too deeply")
    return report


def _too_deep(line: str, report: dict[str, Any]) -> bool:
    if line.count("[") + line.count("{") <= DEEPEST:
        return False  # the usual case
    level: list[Any] = [report]
    for _ in range(DEEPEST):
        children = (node.values() if type(node) is dict else node for node in level)
        level = [inner for values in children for inner in values if type(inner) in (list, dict)]
        if not level:
            return False
    return True


def name_of(kind: type[Any]) -> str:
    """The name of a class, cut to the length that reports allow."""
    return kind.__name__[:LONGEST_NAME]
