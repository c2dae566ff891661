"""The curve of a metric over the steps of a training, short enough to draw, with its band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.learn.metrics import MetricsRow
from nano_rl.report.panel import interval_of

AT_MOST = 400
"""largest number of points of a curve; longer curves are averaged in bins"""
INTERVAL = "95 % interval of each step"
RANGE = "least to greatest of the steps around"
FEW = 10
"""number of steps below which a curve is not smoothed and has no range band"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The curve of a metric; all fields with points have the same length."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    """as measured (or means of bins)"""
    line: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    band: str
    """description of the band; empty if there is none"""


def series(rows: Sequence[MetricsRow], name: str) -> Series | None:
    """The curve of a metric; None if no step has it. The band is an interval if every row has one."""
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
    """Centred windows of a twentieth of the curve, at least five values."""
    half = max(2, len(values) // 40)
    return [values[max(0, i - half) : i + half + 1] for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
