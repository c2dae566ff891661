"""The plots of a report page: the main ones, and a small one for every other metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.learn.metrics import GRADED, HELD_OUT, PART, SUCCESS, MetricsRow
from nano_rl.preferences.over_optimisation import GOLD, gold_and_proxy, proxy_of
from nano_rl.report.plot import INTERVAL, Plotter, Series, series

PHASES = {
    "seconds_generate": "generate",
    "seconds_sandbox": "sandbox",
    "seconds_grade": "grade",
    "seconds_train": "train",
    "seconds_save": "save",
}
"""metric -> label, for the phases of a step; the first three are the rollout"""
MAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "Reward": (("reward_mean",), "mean over the rollouts of a step"),
    "KL": (("kl_reference", "approx_kl", "mismatch_kl"), "nats a token"),
    "Entropy": (("entropy",), "nats a token"),
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
    f"{SUCCESS}all": "Success",
    "reward_mean": "Reward",
    "entropy": "Entropy",
    "approx_kl": "KL of the update",
    "grad_norm": "Gradient norm",
    "tokens_per_second_rollout": "Tokens a second in rollouts",
}
"""metric -> title of its plot in a comparison of trainings"""


@dataclass(frozen=True, slots=True)
class PlotOf:
    title: str
    about: str
    band: str
    svg: str
    labels: tuple[str, ...] = ()
    """labels of its curves in the order of the page's colours, if there are several"""


def main_plots(
    rows: Sequence[MetricsRow], plotter: Plotter, held_out: Sequence[MetricsRow] = ()
) -> list[PlotOf]:
    """Plots of reward, success by level and on held-out tasks, optimisation and time, as far as measured."""
    plots = []
    for title, (metrics, about) in MAIN.items():
        found = [curve for name in metrics if (curve := series(rows, name)) is not None]
        if found:
            plots.append(_plot(title, about, found, plotter))
        if title == "Reward":
            plots += _success(rows, plotter) + _held_out(held_out, plotter)
            plots += _gold_and_proxy(rows, plotter)
    return [*plots, *_time(rows, plotter)]


def compared_plots(
    trainings: Sequence[tuple[str, Sequence[MetricsRow], Sequence[MetricsRow]]], plotter: Plotter
) -> list[PlotOf]:
    """One plot per metric with one curve per training; `trainings` are (name, rows, held-out rows)."""
    names = [name for name, _, _ in trainings]
    found = [("Held-out success", [held_out_curve(held_out) for _, _, held_out in trainings])]
    found += [(t, [series(rows, metric) for _, rows, _ in trainings]) for metric, t in COMPARED.items()]
    plots = []
    for title, curves in found:
        known = [(name, curve) for name, curve in zip(names, curves, strict=True) if curve is not None]
        if known:
            labels, drawn = tuple(name for name, _ in known), [curve for _, curve in known]
            svg = plotter.curves(
                drawn, f"{title} over the steps", labels=labels, share="success" in title.lower(),
                least_span=_least_span(drawn),
            )  # fmt: skip
            plots.append(PlotOf(title, "", drawn[0].band, svg, labels))
    return plots


def other_plots(rows: Sequence[MetricsRow], plotter: Plotter) -> list[PlotOf]:
    """A small plot of each metric without a main plot, by name."""
    shown = {metric for metrics, _ in MAIN.values() for metric in metrics} | set(PHASES)
    names = sorted({name for row in rows for name in row} - shown)
    plots = []
    for name in names:
        curve = series(rows, name)
        if curve is None or name.startswith(_LEFT_OUT):
            continue
        svg = plotter.curves([curve], f"{name} over the steps", small=True, least_span=_least_span([curve]))
        plots.append(PlotOf(name, "", curve.band, svg))
    return plots


def _success(rows: Sequence[MetricsRow], plotter: Plotter) -> list[PlotOf]:
    names = sorted({name for row in rows for name in row if name.startswith(SUCCESS)})
    found = [curve for name in names if (curve := series(rows, name)) is not None]
    return [_plot("Success by level", "share of the graded rollouts", found, plotter)] if found else []


def _held_out(rows: Sequence[MetricsRow], plotter: Plotter) -> list[PlotOf]:
    curve = held_out_curve(rows)
    if curve is None:
        return []
    title, about = "Held-out success", "share of tasks that nothing was learned from, one run each"
    svg = plotter.curves([curve], f"{title} over the steps", labels=["held-out"], share=True)
    return [PlotOf(title, about, curve.band, svg)]


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


def _gold_and_proxy(rows: Sequence[MetricsRow], plotter: Plotter) -> list[PlotOf]:
    """Gold (tests) and proxy reward over the steps, and over the KL to the start."""
    proxy = proxy_of(rows)
    found = [curve for name in (GOLD, proxy) if name and (curve := series(rows, name)) is not None]
    if len(found) < 2:
        return []
    title, about = "Gold and proxy", "share whose tests pass, and what the trained reward model or judge says"
    labels = ("gold: tests", f"proxy: {str(proxy).removeprefix(PART)}")
    svg = plotter.curves(found, f"{title} over the steps", share=True)
    plots = [PlotOf(title, about, "", svg, labels)]
    paid = sorted((w.kl, w.gold, w.proxy) for w in gold_and_proxy(rows) if w.kl is not None)
    if len(paid) > 1:
        kl = tuple(k for k, _, _ in paid)
        curves = [
            Series(name=name, steps=kl, values=values, line=values, low=values, high=values, band="")
            for name, values in zip(labels, zip(*((g, p) for _, g, p in paid), strict=True), strict=True)
        ]
        across = "KL to the start, nats a token"
        svg = plotter.curves(curves, f"{title} over the KL", share=True, across=across)
        plots.append(PlotOf(f"{title} by KL", "means over neighbouring steps", "", svg, labels))
    return plots


def _time(rows: Sequence[MetricsRow], plotter: Plotter) -> list[PlotOf]:
    parts = {label: [row.get(name) or 0.0 for row in rows] for name, label in PHASES.items()}
    measured = {label: values for label, values in parts.items() if any(values)}
    if not measured:
        return []
    steps = [float(row.get("step") or 0) for row in rows]
    svg = plotter.stack(steps, measured, "Seconds of each step by phase")
    about = "seconds of each step; generate, sandbox and grade are the rollout"
    return [PlotOf("Time by phase", about, "", svg, tuple(measured))]


def _plot(title: str, about: str, found: list[Series], plotter: Plotter) -> PlotOf:
    share = all(curve.name in SHARES or curve.name.startswith(SUCCESS) for curve in found)
    labels = tuple(curve.name.removeprefix(SUCCESS).replace("_", " ") for curve in found)
    svg = plotter.curves(
        found, f"{title} over the steps", labels=labels, share=share, least_span=_least_span(found)
    )
    bands = "; ".join(dict.fromkeys(curve.band for curve in found if curve.band))
    return PlotOf(title, about, bands, svg, labels if len(found) > 1 else ())
