"""Suites: named generators of tasks, each a set of views, imported when they are used.

A suite is a `TaskSuite`, registered in the entry point group `nano.suites` or named as `path.py:name`.
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

from pydantic import ValidationError

from nano_shared.errors import UsageError
from nano_shared.extension_points import (
    Extensions,
    call_extension,
    described,
    extension_names,
    find_extension,
    is_reference,
    refuse_missing,
    takes,
)
from nano_shared.files import content_hash
from nano_shared.hidden_checks import HiddenChecks
from nano_shared.process import parse
from nano_shared.types import Limits, OracleAction, Provenance, Split, Task

GROUP = "nano.suites"
EARLIER = "earlier"
"""view of the tasks that come before a task in its project"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The fields of a task that a view sets; families leave some of them to their view."""

    prompt: str
    hidden: HiddenChecks
    oracle: tuple[OracleAction, ...]
    program: tuple[str, str] = ("", "")
    """family and hash of what it is made from"""
    tools: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()
    check: str | None = None
    limits: Limits = Limits(max_turns=4, max_tokens=256)  # noqa: RUF009 (frozen)
    earlier: tuple[Made, ...] = ()
    """tasks that come before it in its project"""


_SAME_FIELDS = tuple(one.name for one in fields(Made) if one.name not in ("earlier", "program"))


@dataclass(frozen=True, slots=True)
class View:
    """A generator of tasks of one kind and level."""

    name: str
    level: int
    make: Callable[[random.Random, Split, int], Made]
    """(random generator, split, level) -> fields of a task; the generator is the only source of randomness"""
    extra: bool = False
    """True if tasks of it are only made when the view is named"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSuite:
    name: str
    version: str
    """version of the generator: a key identifies a task only within one version"""
    about: str
    """one line for `nano-rl tasks list --suites`"""
    views: tuple[View, ...]
    """views of one name must differ in level"""
    member: Callable[[str], TaskSuite] | None = None
    """for a suite with members: the argument of `NAME:ARGUMENT` -> its suite"""

    def make(self, view: View, split: Split, seed: int) -> Task:
        """The task of a view, split and seed; deterministic."""
        rng = random.Random(f"{self.version}:{view.name}:{view.level}:{split}:{seed}")
        named = f"suite {self.name}, view {view.name},"
        made = call_extension(view.make, rng, split, view.level, name=named, error=UsageError)
        if not isinstance(made, Made):
            raise UsageError(f"{named} made {described(made)}, and must return a Made")
        key = f"{self.name}-{self.version}:L{view.level}:{view.name}:{made.program[0]}:{split}-{seed}"
        task = self._task(made, view.name, view.level, split, seed, key)
        before = [
            self._task(one, EARLIER, view.level, split, seed, f"{key}/{number}")
            for number, one in enumerate(made.earlier, 1)
        ]
        return task.model_copy(update={"earlier": tuple(before)}) if before else task

    def _task(self, made: Made, view: str, level: int, split: Split, seed: int, key: str) -> Task:
        given = {name: getattr(made, name) for name in _SAME_FIELDS}
        given |= dict(zip(("family", "program_hash"), made.program, strict=True))
        origin = Provenance(source="generated", generator=f"nano_rl.tasks {self.version}", seed=seed)
        try:
            return Task(key=key, split=split, level=level, view=view, provenance=origin, **given)
        except ValidationError as problem:
            error = problem.errors()[0]
            where = ".".join(map(str, error["loc"]))
            raise UsageError(
                f"suite {self.name}, view {view}, made no task: {where}: {error['msg']}"
            ) from None


TASK_CHECKS: Extensions[Callable[[Iterator[Task], int], list[Task]]] = Extensions("nano.task_checks")
"""(tasks, n) -> the first n of them that may be trained on"""


def suite_names() -> list[str]:
    """The names of all suites. Raises ConfigError if two packages register one name."""
    return extension_names(GROUP)


def find_suite(name: str) -> TaskSuite:
    """The suite of that name, of `NAME:ARGUMENT`, or of `path.py:name`. Raises UsageError for an unknown
    name, and ConfigError for a suite that cannot be loaded."""
    base, colon, argument = name.partition(":")
    if colon and base in suite_names():
        suite: TaskSuite = find_extension(GROUP, base, TaskSuite, check=_problem)
        if suite.member is None:
            raise UsageError(f"suite {base!r} takes no argument, and {argument!r} was given")
        return suite.member(argument)
    if not is_reference(name) and name not in suite_names():
        refuse_missing(GROUP, base)
        raise UsageError(f"unknown suite {name!r}; suites: {', '.join(suite_names())}, or path.py:name")
    return find_extension(GROUP, name, TaskSuite, check=_problem)


def _problem(suite: TaskSuite) -> str | None:
    if not suite.views or not all(isinstance(view, View) for view in suite.views):
        return "has no views: a suite is made of at least one View"
    for view in suite.views:
        if wrong := takes(view.make, "rng", "split", "level"):
            return f"has a view {view.name!r} whose `make` {wrong}"
    return None


TEST_SHARE = 5
"""one in this many families is in the test split"""


def split_of(family: str) -> Split:
    """The split of a family, by a hash of its name: the same in every version and view."""
    digest = hashlib.sha256(f"split:{family}".encode()).digest()
    return Split.TEST if int.from_bytes(digest[:8], "big") % TEST_SHARE == 0 else Split.TRAIN


class Anonymous(ast.NodeTransformer):
    """Renames every name that the function binds, in order of appearance, and drops annotations."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def _rename(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self._rename(node.name)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        for arg in node.args.args:
            arg.arg, arg.annotation = self._rename(arg.arg), None
        bound = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        for name in bound:
            self._rename(name)
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node


def program_hash(source: str) -> str:
    """Content hash of the source's AST with names, annotations and docstrings normalised away."""
    return content_hash(ast.dump(Anonymous().visit(parse(source))))
