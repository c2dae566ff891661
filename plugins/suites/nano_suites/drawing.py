"""Tasks drawn of a suite, evenly over its levels and views."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from nano_rl.tasks.suite import TaskSuite, View, find_suite
from nano_shared.errors import UsageError
from nano_shared.types import Split, Task


def make_tasks(
    *,
    suite: str = "functions",
    levels: Sequence[int],
    n: int,
    seed: int,
    split: Split,
    views: Sequence[str] | None = None,
) -> list[Task]:
    """`n` distinct tasks, distributed evenly over the levels and over the views of each level. The same
    arguments give the same tasks; a smaller `n` gives a prefix. Raises UsageError for an unknown suite, level
    or view, or a negative `n`."""
    if n < 0:
        raise UsageError(f"n = {n}: the number of tasks cannot be negative")
    drawn = draw_tasks(suite=suite, levels=levels, seed=seed, split=split, views=views)
    return list(itertools.islice(drawn, n))


def draw_tasks(
    *,
    suite: str = "functions",
    levels: Sequence[int],
    seed: int,
    split: Split,
    views: Sequence[str] | None = None,
) -> Iterator[Task]:
    """The infinite sequence of which `make_tasks` takes the first `n`. Raises as it does, at once."""
    supply = find_suite(suite)
    return _endless(
        supply, choose_views(supply.views, levels, views), random.Random(f"make:{suite}:{seed}:{split}"),
        split,
    )  # fmt: skip


def _endless(supply: TaskSuite, chosen: list[list[View]], rng: random.Random, split: Split) -> Iterator[Task]:
    keys: set[str] = set()
    while True:
        of_level = chosen[len(keys) % len(chosen)]
        view = of_level[len(keys) // len(chosen) % len(of_level)]
        task = supply.make(view, split, rng.randrange(2**48))
        if task.key not in keys:
            keys.add(task.key)
            yield task


def choose_views(
    every: Sequence[View], levels: Sequence[int], names: Sequence[str] | None
) -> list[list[View]]:
    """[levels][views] the chosen views of each level; levels without any are left out."""
    known = sorted({v.level for v in every})
    if wrong := [x for x in levels if x not in known] or ([] if levels else ["none"]):
        raise UsageError(f"unknown level {wrong[0]}; levels: {', '.join(map(str, known))}")
    spelt = {v.name for v in every}
    if names and (unknown := [x for x in names if x not in spelt]):
        raise UsageError(f"unknown view {unknown[0]!r}; views: {', '.join(sorted(spelt))}")
    chosen = [
        [v for v in every if v.level == x and (v.name in names if names else not v.extra)]
        for x in dict.fromkeys(levels)
    ]
    chosen = [of_level for of_level in chosen if of_level]
    if not chosen:
        raise UsageError(
            f"no view among {', '.join(names or ())} belongs to levels {', '.join(map(str, levels))}"
        )
    return chosen
