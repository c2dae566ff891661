"""Task views: the same programs shown as literals to copy, values to predict, lines to fix or to write."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from nano_rl.tasks.first_views import (
    make_calculate,
    make_choose,
    make_complete,
    make_copy,
    make_emit,
    make_predict,
    make_replace,
)
from nano_rl.tasks.grammar import VERSION
from nano_rl.tasks.made import Made
from nano_rl.tasks.repair_views import make_body, make_fix, make_repair
from nano_shared.types import Provenance, Split, Task


@dataclass(frozen=True, slots=True)
class View:
    """A way to make a task of one level."""

    name: str
    level: int
    make: Callable[[random.Random, Split, int], Made]
    extra: bool = False
    """made only when it is asked for by name"""


VIEWS = (
    View("copy", 0, make_copy),
    View("emit", 0, make_emit),
    View("complete", 1, make_complete),
    View("calculate", 1, make_calculate),
    View("predict", 1, make_predict),
    View("choose", 1, make_choose, extra=True),
    View("fix", 2, make_fix),
    View("repair", 2, make_repair),
    View("replace", 2, make_replace, extra=True),
    View("body", 3, make_body),
    View("repair", 3, make_repair),
)


def make_task(view: View, split: Split, seed: int) -> Task:
    """The task of one view, split and seed; the same ones always make the same task."""
    rng = random.Random(f"{VERSION}:{view.name}:{view.level}:{split}:{seed}")
    made = view.make(rng, split, view.level)
    return Task(
        key=f"functions-{VERSION}:L{view.level}:{view.name}:{made.family}:{split}-{seed}",
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
        provenance=Provenance(source="generated", generator=f"nano_rl.tasks {VERSION}", seed=seed),
    )
