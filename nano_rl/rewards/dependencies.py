"""Dependencies that a change brings in: imports from outside, and lines of requirement files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath

from nano_rl.rewards.changes import Change
from nano_shared.types import Task

_MANIFESTS = ("requirements*.txt", "pyproject.toml", "setup.py", "setup.cfg", "Pipfile", "environment.y*ml")


def new_dependencies(task: Task, changed: Mapping[str, Change]) -> set[str]:
    """Modules from outside that changed files import and no file of the task did, and manifests that grew."""
    known = set(sys.stdlib_module_names) | {"__future__", "pytest"}
    paths = [*task.files, *changed]
    known |= {PurePosixPath(p).stem for p in paths} | {p.split("/")[0] for p in paths if "/" in p}
    known |= {name for text in task.files.values() for name in imported(text)}
    known |= {name for change in changed.values() for name in imported(change.before or "")}
    found = {
        name
        for path, change in changed.items()
        if path.endswith(".py")
        for name in imported(change.after or "")
        if name not in known
    }
    manifests = {p for p, c in changed.items() if c.added_lines and _manifest(p)}
    return found | manifests


def imported(text: str) -> set[str]:
    """Top-level modules that a Python text imports; none where it cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def _manifest(path: str) -> bool:
    return any(fnmatch(path.rpartition("/")[2], pattern) for pattern in _MANIFESTS)
