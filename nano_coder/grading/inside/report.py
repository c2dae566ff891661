"""Reports, one JSON object a line, read in jails and outside; and the artifact that a jail imports."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from typing import Any

LONGEST = 1 << 20
"""characters of one report"""
DEEPEST = 400
"""levels of JSON; a value takes at most three for each level of its own (`value_codec`)"""
LONGEST_NAME = 200
"""characters of a name in a report: the solution chooses class names"""
SKIPS = ("SkipTest", "Skipped", "Exit")
"""exceptions that make test runners skip a test"""


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


# ------------------------------------------------------------------------------------- the artifact


ROOT = "/work"


def write_files(root: str, files: dict[str, str]) -> None:
    """Write texts by path; a surrogate stands for a byte that is not UTF-8."""
    for path, text in files.items():
        place = os.path.join(root, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)


def module_name(root: str, target: str) -> str:
    """The name under which tests import the target; appends its folder to sys.path."""
    parts = target.removesuffix(".py").split("/")
    folder = root
    while len(parts) > 1 and not os.path.exists(os.path.join(folder, parts[0], "__init__.py")):
        folder = os.path.join(folder, parts.pop(0))
    sys.path += [place for place in dict.fromkeys((folder, root)) if place not in sys.path]
    return ".".join(parts)


def load(root: str, target: str) -> types.ModuleType:
    """Import the target from its file, even if another module has its name."""
    name = module_name(root, target)
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec: Any = importlib.util.spec_from_file_location(name, os.path.join(root, target))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module
