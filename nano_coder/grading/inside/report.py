"""One report a line, as JSON: bounded in length and depth wherever one is read, in a jail and outside."""

from __future__ import annotations

import json
from typing import Any

LONGEST = 1 << 20
"""of one report"""
DEEPEST = 400
"""levels of JSON; a value that crosses takes at most three for each of its own (`wire.DEEPEST`)"""
LONGEST_NAME = 200
"""characters of a name in a report: a solution chooses those of its classes"""


class Malformed(ValueError):
    """A line that is no report."""


def read(line: str, longest: int = LONGEST) -> dict[str, Any]:
    """The report that a line holds. Raises Malformed, and nothing else."""
    if len(line) > longest:
        raise Malformed("too long")
    try:
        told = json.loads(line)
    except (ValueError, RecursionError, MemoryError) as error:
        raise Malformed(type(error).__name__) from None
    if type(told) is not dict:
        raise Malformed("no object")
    if _too_deep(line, told):
        raise Malformed("nested too deeply")
    return told


def _too_deep(line: str, told: dict[str, Any]) -> bool:
    if line.count("[") + line.count("{") <= DEEPEST:
        return False  # as in most
    level: list[Any] = [told]
    for _ in range(DEEPEST):
        held = (node.values() if type(node) is dict else node for node in level)
        level = [inner for values in held for inner in values if type(inner) in (list, dict)]
        if not level:
            return False
    return True


def name_of(kind: type[Any]) -> str:
    """The name of a class, short enough for a report."""
    return kind.__name__[:LONGEST_NAME]
