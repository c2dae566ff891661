"""Suites: named supplies of tasks, each a set of views, imported only when somebody asks for it.

A suite is a `TaskSuite`, registered in the entry point group `nano.suites` or named as `path.py:name`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from nano_shared.errors import UsageError
from nano_shared.extensions import extension_names, find_extension, is_file_reference
from nano_shared.types import HiddenChecks, Limits, OracleAction, Provenance, Split, Task

GROUP = "nano.suites"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a view fills in of a task."""

    prompt: str
    family: str
    program_hash: str
    hidden: HiddenChecks
    oracle: tuple[OracleAction, ...]
    tools: tuple[str, ...]
    files: dict[str, str]
    artifacts: tuple[str, ...] = ()
    check: str | None = None
    limits: Limits = Limits(max_turns=4, max_tokens=256)  # noqa: RUF009 (frozen)


@dataclass(frozen=True, slots=True)
class View:
    """A way to make a task of one level."""

    name: str
    level: int
    make: Callable[[random.Random, Split, int], Made]
    """generator, split, level -> what the view fills in; all chance comes from the generator"""
    extra: bool = False
    """made only when it is asked for by name"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSuite:
    """A named supply of tasks."""

    name: str
    version: str
    """of its generator: the same key makes the same task only under the same version"""
    about: str
    """one line for `nano-rl tasks list --suites`"""
    views: tuple[View, ...]
    """several of one name must differ in level"""
    member: Callable[[str], TaskSuite] | None = None
    """`NAME:ARGUMENT` -> the suite of that argument, where a suite is made of several"""

    def make(self, view: View, split: Split, seed: int) -> Task:
        """The task of one view, split and seed; the same ones always make the same task."""
        rng = random.Random(f"{self.version}:{view.name}:{view.level}:{split}:{seed}")
        made = view.make(rng, split, view.level)
        return Task(
            key=f"{self.name}-{self.version}:L{view.level}:{view.name}:{made.family}:{split}-{seed}",
            prompt=made.prompt,
            files=made.files,
            artifacts=made.artifacts,
            tools=made.tools,
            limits=made.limits,
            check=made.check,
            hidden=made.hidden,
            oracle=made.oracle,
            split=split,
            level=view.level,
            family=made.family,
            view=view.name,
            program_hash=made.program_hash,
            provenance=Provenance(source="generated", generator=f"nano_rl.tasks {self.version}", seed=seed),
        )


def suite_names() -> list[str]:
    """The suites there are. Raises ConfigError where two packages register one name."""
    return extension_names(GROUP)


def find_suite(name: str) -> TaskSuite:
    """The suite of that name, of `NAME:ARGUMENT` where it takes one, or of `path.py:name`.

    Raises UsageError with the names there are, and ConfigError for a suite that cannot be loaded.
    """
    base, colon, argument = name.partition(":")
    if colon and base in suite_names():
        suite: TaskSuite = find_extension(GROUP, base, TaskSuite)
        if suite.member is None:
            raise UsageError(f"suite {base!r} takes no argument, and {argument!r} was given")
        return suite.member(argument)
    if not is_file_reference(name) and name not in suite_names():
        raise UsageError(f"unknown suite {name!r}; suites: {', '.join(suite_names())}, or path.py:name")
    return find_extension(GROUP, name, TaskSuite)


TEST_SHARE = 5
"""one family in so many is of the test split"""


def split_of(family: str) -> Split:
    """The split of a family, by its hash: the same in every version and for every view."""
    digest = hashlib.sha256(f"split:{family}".encode()).digest()
    return Split.TEST if int.from_bytes(digest[:8], "big") % TEST_SHARE == 0 else Split.TRAIN
