"""The plots of a training as data for the viewer: the main ones, and one for every other metric.

A plot is a dictionary that the script of `nano-coder view` draws: `title`, `about`, `across` (what the
horizontal axis is), `share` (the axis is 0 to 1), `span` (its smallest span), `stack`, and `curves`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from nano_rl.learn.metrics import GRADED, HELD_OUT, PART, SUCCESS, MetricsRow
from nano_rl.training_record import seconds_of
from nano_view.report.panel import interval_of
from nano_view.report.training import GOLD, gold_and_proxy, proxy_of

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
    found = ((row.get("step"), row.get(name), interval_of(name, row)) for row in rows)
    known = [(float(step or 0), value, bounds) for step, value, bounds in found if value is not None]
    if not known:
        return None
    size = -(-len(known) // AT_MOST)
    bins = [known[i : i + size] for i in range(0, len(known), size)]
    steps = tuple(_mean([step for step, _, _ in b]) for b in bins)
    values = tuple(_mean([value for _, value, _ in b]) for b in bins)
    intervals = [[i for _, _, i in b if i is not None] for b in bins]
    if all(intervals):
        low = tuple(_mean([low for low, _ in b]) for b in intervals)
        high = tuple(_mean([high for _, high in b]) for b in intervals)
        return Series(name=name, steps=steps, values=values, line=values, low=low, high=high, band=INTERVAL)
    if len(values) < FEW:
        return _bare(name, steps, values)
    windows = _windows(values)
    return Series(
        name=name, steps=steps, values=values, line=tuple(_mean(window) for window in windows),
        low=tuple(min(window) for window in windows), high=tuple(max(window) for window in windows),
        band=RANGE,
    )  # fmt: skip


def _windows(values: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Centred windows of a twentieth of the curve, at least five values."""
    half = max(2, len(values) // 40)
    return [values[max(0, i - half) : i + half + 1] for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


Plot = dict[str, Any]
LENGTH = "tokens_per_rollout"
"""derived: sampled tokens of a step over its rollouts"""
PHASES = {
    "seconds_generate": "generate", "seconds_sandbox": "sandbox", "seconds_grade": "grade",
    "seconds_train": "train", "seconds_save": "save",
}  # fmt: skip
"""metric -> label, for the phases of a step; the first three are the rollout"""
MAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "Reward": (("reward_mean",), "mean over the rollouts of a step"),
    "KL": (("kl_reference", "approx_kl", "mismatch_kl"), "nats a token"),
    "Entropy": (("entropy",), "nats a token"),
    "Length": ((LENGTH,), "sampled tokens a rollout"),
    "Clipped tokens": (("clip_low", "clip_high"), "share of the trained tokens"),
    "Gradient norm": (("grad_norm",), "before it is clipped"),
    "Effective samples": (("ess",), "share of the tokens that the importance weights leave"),
    "Groups without a signal": (("frac_zero_std",), "share of the groups of a step"),
    "Tokens a second": (
        ("tokens_per_second_generate", "tokens_per_second_rollout", "tokens_per_second_train"),
        "sampled while generating, sampled in the whole rollout, trained",
    ),
}
"""title -> metrics and description"""
SHARES = {"frac_zero_std", "ess", f"{SUCCESS}all"}
"""metrics that are plotted from 0 to 1"""
_LEFT_OUT = ("step", GRADED, HELD_OUT)
LEAST_SPANS = {"kl_reference": 1e-3, "approx_kl": 1e-3, "mismatch": 1e-3, "ratio_deviation": 1e-3}
"""prefix of a metric -> smallest span of its axis, because smaller changes are rounding"""


COMPARED = {
    f"{SUCCESS}all": "Success", "reward_mean": "Reward", "entropy": "Entropy",
    "kl_reference": "KL to the start", "approx_kl": "KL of the update", LENGTH: "Sampled tokens a rollout",
    "grad_norm": "Gradient norm", "tokens_per_second_rollout": "Tokens a second in rollouts",
}  # fmt: skip
"""metric -> title of its plot in a comparison of trainings"""


def main_plots(rows: Sequence[MetricsRow], held_out: Sequence[MetricsRow] = ()) -> list[Plot]:
    """Plots of reward, success by level and on held-out tasks, optimisation and time, as far as measured."""
    rows = with_lengths(rows)
    plots = []
    for title, (metrics, about) in MAIN.items():
        found = [curve for name in metrics if (curve := series(rows, name)) is not None]
        if found:
            plots.append(_plot(title, about, found))
        if title == "Reward":
            plots += _success(rows) + held_out_plot(held_out) + _gold_and_proxy(rows)
    return [*plots, *_time(rows)]


def with_lengths(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """The rows with the derived metric of lengths, where tokens and rollouts were counted."""
    counted = [(row, row.get("tokens_rollout"), row.get("rollouts")) for row in rows]
    return [{**row, LENGTH: tokens / n} if tokens and n else row for row, tokens, n in counted]


def compared_plots(
    trainings: Sequence[tuple[str, Sequence[MetricsRow], Sequence[MetricsRow]]],
) -> list[Plot]:
    """One plot per metric with one curve per training; `trainings` are (name, rows, held-out rows)."""
    names = [name for name, _, _ in trainings]
    found = [("Held-out success", [held_out_curve(held_out) for _, _, held_out in trainings])]
    longer = [with_lengths(rows) for _, rows, _ in trainings]
    found += [(title, [series(rows, metric) for rows in longer]) for metric, title in COMPARED.items()]
    plots = []
    for title, curves in found:
        known = {name: curve for name, curve in zip(names, curves, strict=True) if curve is not None}
        if known:
            share = "success" in title.lower()
            plots.append(_drawn(title, "", list(known.values()), labels=list(known), share=share))
    return plots


def with_hours(plots: list[Plot], rows: Mapping[str, Sequence[MetricsRow]]) -> list[Plot]:
    """The plots over steps with `hours` beside the steps of each curve: how long the training had worked.

    `rows` are the metrics of the training that a curve is named after; "" of all others.
    """
    for curve in (curve for plot in plots if plot["across"] == "step" for curve in plot["curves"]):
        measured = rows.get(curve["name"], rows.get("", ()))
        steps = [float(row.get("step") or 0) for row in measured]
        worked = [0.0, *accumulate(seconds_of(row) / 3600 for row in measured)]
        if worked[-1]:
            curve["hours"] = [worked[bisect_right(steps, step)] for step in curve["steps"]]
    return plots


def other_plots(rows: Sequence[MetricsRow]) -> list[Plot]:
    """A plot of each metric without a main plot, by name."""
    shown = {metric for metrics, _ in MAIN.values() for metric in metrics} | set(PHASES)
    names = sorted({name for row in rows for name in row} - shown)
    curves = [series(rows, name) for name in names if not name.startswith(_LEFT_OUT)]
    return [_drawn(curve.name, "", [curve]) for curve in curves if curve is not None]


def _success(rows: Sequence[MetricsRow]) -> list[Plot]:
    names = sorted({name for row in rows for name in row if name.startswith(SUCCESS)})
    found = [curve for name in names if (curve := series(rows, name)) is not None]
    return [_plot("Success by level", "share of the graded rollouts", found)] if found else []


def held_out_plot(rows: Sequence[MetricsRow]) -> list[Plot]:
    curve = held_out_curve(rows)
    about = "share of tasks that nothing was learned from, one run each"
    return [_drawn("Held-out success", about, [curve], labels=["held-out"], share=True)] if curve else []


def held_out_curve(rows: Sequence[MetricsRow]) -> Series | None:
    """Held-out success over the steps with its interval; None if it was not measured."""
    known = [row for row in rows if row.get("success") is not None]
    if not known:
        return None
    steps, values, low, high = (
        tuple(float(row[name] or 0) for row in known) for name in ("step", "success", "low", "high")
    )
    return Series(name=HELD_OUT, steps=steps, values=values, line=values, low=low, high=high, band=INTERVAL)


def _least_span(found: Sequence[Series]) -> float:
    spans = [span for curve in found for name, span in LEAST_SPANS.items() if curve.name.startswith(name)]
    return max(spans, default=0.0) if len(spans) == len(found) else 0.0


def _gold_and_proxy(rows: Sequence[MetricsRow]) -> list[Plot]:
    """Gold (tests) and proxy reward over the steps, and over the KL to the start."""
    proxy = proxy_of(rows)
    found = [curve for name in (GOLD, proxy) if name and (curve := series(rows, name)) is not None]
    if len(found) < 2:
        return []
    title, about = "Gold and proxy", "share whose tests pass, and what the trained reward model or judge says"
    labels = ["gold: tests", f"proxy: {str(proxy).removeprefix(PART)}"]
    plots = [_drawn(title, about, found, labels=labels, share=True)]
    paid = sorted((w.kl, w.gold, w.proxy) for w in gold_and_proxy(rows) if w.kl is not None)
    if len(paid) > 1:
        kl = tuple(k for k, _, _ in paid)
        curves = [_bare(name, kl, tuple(point[n + 1] for point in paid)) for n, name in enumerate(labels)]
        about = "means over neighbouring steps"
        across = "KL to the start, nats a token"
        plots.append(_drawn(f"{title} by KL", about, curves, share=True) | {"across": across})
    return plots


def _time(rows: Sequence[MetricsRow]) -> list[Plot]:
    """A stack of the phases, of as many points as a curve has."""
    every: list[MetricsRow] = [
        {**{name: 0.0 for name in PHASES}, **{n: v for n, v in row.items() if v is not None}} for row in rows
    ]
    curves = [curve for name in PHASES if (curve := series(every, name)) is not None and any(curve.values)]
    about = "seconds of each step; generate, sandbox and grade are the rollout"
    found = [_bare(PHASES[curve.name], curve.steps, curve.values) for curve in curves]
    return [_drawn("Time by phase", about, found) | {"stack": True}] if found else []


def _bare(name: str, steps: tuple[float, ...], values: tuple[float, ...]) -> Series:
    return Series(name=name, steps=steps, values=values, line=values, low=values, high=values, band="")


def _plot(title: str, about: str, found: list[Series]) -> Plot:
    share = all(curve.name in SHARES or curve.name.startswith(SUCCESS) for curve in found)
    labels = [curve.name.removeprefix(SUCCESS).replace("_", " ") for curve in found]
    return _drawn(title, about, found, labels=labels, share=share)


def _drawn(
    title: str, about: str, curves: Sequence[Series], *, labels: Sequence[str] = (), share: bool = False
) -> Plot:
    named = zip(labels or [curve.name for curve in curves], curves, strict=True)
    return {
        "title": title, "about": about, "across": "step", "share": share, "span": _least_span(curves),
        "curves": [asdict(c) | {"name": name, "interval": c.band == INTERVAL} for name, c in named],
    }  # fmt: skip
