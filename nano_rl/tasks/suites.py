"""Suites by name: each a set of views, imported only when somebody asks for it.

A suite is a module with a value `SUITE`; one line in `SUITES` plugs it into `nano-rl tasks make`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from nano_rl.tasks.made import Made
from nano_shared.errors import UsageError
from nano_shared.types import Provenance, Split, Task


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


def _in(module: str) -> Callable[[], TaskSuite]:
    def load() -> TaskSuite:
        suite: TaskSuite = import_module(module).SUITE
        return suite

    return load


SUITES: dict[str, Callable[[], TaskSuite]] = {
    "functions": _in("nano_rl.tasks.views"),
    "shell": _in("nano_rl.domains.shell"),
    "sql": _in("nano_rl.domains.sql"),
    "data": _in("nano_rl.domains.data"),
    "logic": _in("nano_rl.domains.logic"),
    "workplace": _in("nano_rl.domains.workplace"),
    "reasoning-gym": _in("nano_rl.domains.reasoning"),
}


def find_suite(name: str) -> TaskSuite:
    """The suite of that name. Raises UsageError with the names there are."""
    if name.startswith("reasoning-gym:"):
        from nano_rl.domains.reasoning import suite_of

        return suite_of(name.partition(":")[2])
    if name not in SUITES:
        raise UsageError(f"unknown suite {name!r}; suites: {', '.join(SUITES)}")
    return SUITES[name]()
