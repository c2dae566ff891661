"""Principles of a constitution: text, conditions under which they apply, and deterministic checks."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, field_validator, model_validator

from nano_rl.learn.config import Config
from nano_rl.rewards.changed_files import FileChange
from nano_rl.rewards.diff_size import changed_lines
from nano_shared.errors import ConfigError, UsageError
from nano_shared.settings import parse_config
from nano_shared.types import Denials, Task, Trajectory

_MANIFESTS = ("requirements*.txt", "pyproject.toml", "setup.py", "setup.cfg", "Pipfile", "environment.y*ml")


def new_dependencies(task: Task, changed: Mapping[str, FileChange]) -> set[str]:
    """Third-party modules that changed files newly import, and dependency manifests with added lines."""
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
    """Top-level modules that a Python text imports; empty if it cannot be parsed."""
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


SHIPPED = Path(__file__).with_name("principles.toml")
_TEST_FILES = ("test_*.py", "*_test.py", "conftest.py", "*.snap")
_TEST_FOLDERS = {"test", "tests", "testing", "spec", "specs"}
_LONGEST = 2000
"""number of characters of a line that a pattern is matched against"""


class When(Config):
    """Conditions that must all hold for a principle to apply."""

    changed: str | None = None
    """pattern of file names; one matching file was changed"""
    tool: str | None = None
    """name of a tool that was called"""
    view: str | None = None
    """pattern of the task's view"""
    min_level: int | None = None
    """the task's level is at least this"""


class PrincipleCheck(Config):
    """A deterministic check of a principle."""

    kind: Literal[
        "no_test_edits", "no_new_dependencies", "max_changed_lines", "no_denials", "forbidden", "required"
    ]
    at_most: int | None = Field(None, ge=0)
    """max_changed_lines: the bound"""
    pattern: str | None = None
    """forbidden, required: a regular expression, searched in each added line"""

    @model_validator(mode="after")
    def _complete(self) -> PrincipleCheck:
        if (self.kind == "max_changed_lines") != (self.at_most is not None):
            raise ValueError("`at_most` belongs to max_changed_lines, which needs it")
        if (self.kind in ("forbidden", "required")) != (self.pattern is not None):
            raise ValueError("`pattern` belongs to forbidden and required, which need it")
        return self

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as problem:
            raise ValueError(f"is no regular expression: {problem}") from None
        return pattern


class Principle(Config):
    id: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    text: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0)
    applies_when: When | None = None
    """None: always"""
    check: PrincipleCheck | None = None
    """None: a judge decides"""


class Principles(Config):
    principles: tuple[Principle, ...] = Field(min_length=1)

    @field_validator("principles")
    @classmethod
    def _distinct(cls, principles: tuple[Principle, ...]) -> tuple[Principle, ...]:
        ids = [p.id for p in principles]
        if twice := [i for i in ids if ids.count(i) > 1]:
            raise ValueError(f"id {twice[0]!r} is used twice")
        return principles


def read_principles(path: Path) -> tuple[Principle, ...]:
    """The principles of a TOML, JSON or YAML file. Raises UsageError or ConfigError naming the file."""
    from nano_rl.rewards.registry import read_data

    try:
        return parse_config(Principles, read_data(path)).principles
    except ConfigError as problem:
        raise UsageError(f"{path}: {problem}") from None


def applies(when: When | None, run: Trajectory, changed: Iterable[str]) -> bool:
    """True if all conditions hold for a run that changed these files."""
    if when is None:
        return True
    task = run.task
    tools = {call.name for turn in run.turns for call in turn.calls}
    return (
        (when.changed is None or any(_matches(path, when.changed) for path in changed))
        and (when.tool is None or when.tool in tools)
        and (when.view is None or fnmatch(task.view or "", when.view))
        and (when.min_level is None or (task.level is not None and task.level >= when.min_level))
    )


def obeys(check: PrincipleCheck, run: Trajectory, changed: Mapping[str, FileChange]) -> bool:
    """True if a run passes a check."""
    if check.kind == "no_test_edits":
        return not any(is_test(path) for path, change in changed.items() if change.before is not None)
    if check.kind == "no_new_dependencies":
        return not new_dependencies(run.task, changed)
    if check.kind == "max_changed_lines":
        return changed_lines(run.diff) <= (check.at_most or 0)
    if check.kind == "no_denials":
        return all(o.denials == Denials() for turn in run.turns for o in turn.observations)
    added = [line[:_LONGEST] for change in changed.values() for line in change.added_lines]
    found = any(re.search(check.pattern or "", line) for line in added)
    return found == (check.kind == "required")


def is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return bool(_TEST_FOLDERS & set(folders)) or any(fnmatch(name, pattern) for pattern in _TEST_FILES)


def _matches(path: str, pattern: str) -> bool:
    return fnmatch(path, pattern) or fnmatch(path.rpartition("/")[2], pattern)
