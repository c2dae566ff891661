"""Steps to try a loss on: nine rows of eight trajectories, drawn so that every rule acts somewhere in them.

Each row has a place of its own among the cells below, for its tokens and as a whole; numbers are moved a
little by the draw, and no row comes near a corner. `tests/rl/test_conformance.py` counts the cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, Literal

from nano_rl.conformance.case import Case, make_case

Since = Literal["first update", "later update", "stale sampler", "stale first"]
"""what has moved since the rows were sampled: nothing; the policy since the step began; that, and the sampler
was older; the sampler was older, and the policy is that of the step's start"""

LOW, HIGH, DUAL, FLOOR, CAP, DRIFT = 0.15, 0.3, 1.8, 0.6, 1.6, 0.15
"""settings that the rows are drawn around"""


@dataclass(frozen=True, slots=True)
class RowPlan:
    length: int
    """tokens that are trained"""
    sign: int
    """of the mean advantage"""
    moved: float
    """mean of new - old"""
    stale: float
    """sum of old - behaviour"""
    holes: tuple[int, ...] = ()
    """columns that are not trained"""


PLANS = (
    RowPlan(6, -1, -0.5, 0.2, holes=(2,)),
    RowPlan(4, 1, -0.5, -0.9),
    RowPlan(7, 1, 0.45, 0.9, holes=(0, 4, 5)),
    RowPlan(5, -1, 0.45, -0.2),
    RowPlan(6, 1, 0.03, 0.9),
    RowPlan(4, -1, -0.04, -0.9, holes=(3,)),
    RowPlan(5, -1, 0.9, 0.2),
    RowPlan(8, 1, 0.9, 0.1),
    RowPlan(4, -1, -0.305, 0.9),
)
NAMES = ("a", "b", "c", "a", "d", "e", "f", "g", "h")
"""trajectories; the first one has two rows, which are no neighbours"""
SPREAD = (-0.5, 0.5, -0.08, 0.08, 0.85, -0.85, 0.25, -0.25)
STALE = (0.8, -0.8, 0.1, -0.1, -0.7, 0.7, -0.3, 0.3)


def drawn_step(draw: int | str, *, since: Since = "stale sampler", **settings: Any) -> Case:
    """All rows of a step under these settings."""
    return _rows(draw, since).under(**settings)


@lru_cache(maxsize=64)
def _rows(draw: int | str, since: Since) -> Case:
    random = Random(f"step {draw}")
    rows: dict[str, list[list[float]]] = {
        name: [] for name in ("logprobs", "advantages", "old", "behaviour", "reference")
    }
    for plan in PLANS:
        new = [-random.uniform(0.8, 2.5) for _ in range(plan.length)]
        moved = [0.0] * plan.length
        stale = [0.0] * plan.length
        if since in ("later update", "stale sampler"):
            moved = _around(plan.moved, SPREAD, plan.length, random)
        if since in ("stale sampler", "stale first"):
            stale = _around(plan.stale / plan.length, STALE, plan.length, random)
        old = [n - m for n, m in zip(new, moved, strict=True)]
        rows["logprobs"].append(new)
        rows["old"].append(old)
        rows["behaviour"].append([o - s for o, s in zip(old, stale, strict=True)])
        rows["reference"].append([n - random.choice((-1, 1)) * random.uniform(0.1, 0.9) for n in new])
        rows["advantages"].append(_advantages(plan, random))
    return make_case(**rows, trajectory=NAMES, holes=[plan.holes for plan in PLANS])


def _around(mean: float, spread: Sequence[float], length: int, random: Random) -> list[float]:
    """Numbers of that mean, to a percent, which lie apart by `spread`."""
    apart = [s * random.uniform(0.97, 1.03) for s in spread[:length]]
    return [mean * random.uniform(0.99, 1.01) + s - sum(apart) / length for s in apart]


def _advantages(plan: RowPlan, random: Random) -> list[float]:
    """One a token, as a critic gives them: every third one is of the other sign."""
    return [
        plan.sign * random.uniform(0.4, 0.9) * (-0.5 if place % 3 == 1 else 2.0)
        for place in range(plan.length)
    ]
