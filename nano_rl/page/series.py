"""A metric over the steps: its values, a line through them, and a band around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.metrics import Row
from nano_rl.watch.panel import interval_of

AT_MOST = 400
"""points of a curve; longer ones are averaged in bins, so that a page stays small"""
INTERVAL = "95 % interval of each step"
RANGE = "least to greatest of the steps around"
FEW = 10
"""steps under which nothing is smoothed, and there is no band but an interval"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What is drawn of a metric. All lists have one length."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    """as measured (or means of bins)"""
    line: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    band: str
    """what the band is, in words; empty where there is none"""


def series(rows: Sequence[Row], name: str) -> Series | None:
    """The curve of a metric: None where no step has it. The band is an interval where the rows tell one."""
    known = [
        (float(row.get("step") or 0), value, interval_of(name, row))
        for row in rows
        if (value := row.get(name)) is not None
    ]
    if not known:
        return None
    bins = _bins(known, AT_MOST)
    steps = tuple(_mean([step for step, _, _ in b]) for b in bins)
    values = tuple(_mean([value for _, value, _ in b]) for b in bins)
    intervals = [[i for _, _, i in b if i is not None] for b in bins]
    if all(intervals):
        low = tuple(_mean([low for low, _ in b]) for b in intervals)
        high = tuple(_mean([high for _, high in b]) for b in intervals)
        return Series(name=name, steps=steps, values=values, line=values, low=low, high=high, band=INTERVAL)
    if len(values) < FEW:
        return Series(name=name, steps=steps, values=values, line=values, low=values, high=values, band="")
    windows = _windows(values)
    return Series(
        name=name,
        steps=steps,
        values=values,
        line=tuple(_mean(window) for window in windows),
        low=tuple(min(window) for window in windows),
        high=tuple(max(window) for window in windows),
        band=RANGE,
    )


def _bins(items: Sequence[tuple[float, float, tuple[float, float] | None]], at_most: int):  # type: ignore[no-untyped-def]
    size = -(-len(items) // at_most)
    return [items[i : i + size] for i in range(0, len(items), size)]


def _windows(values: tuple[float, ...]) -> list[tuple[float, ...]]:
    """The steps around each: centred, a twentieth of the curve and at least five."""
    half = max(2, len(values) // 40)
    return [values[max(0, i - half) : i + half + 1] for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
