"""Plots as SVG with the colours and font of the page, so that dark mode and print apply to them.

Matplotlib has no CSS variables: it draws in placeholder colours, which are replaced in the SVG.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from nano_shared.errors import ConfigError
from nano_shared.printable import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
import math
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


READINGS = 100
"""number of points of a curve whose values are shown under the pointer"""
INK, MUTED, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
CATEGORIES = tuple(f"#0a0b1{n}" for n in range(8))
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    colour: f"var(--c{n})" for n, colour in enumerate(CATEGORIES)
}


class Plotter:
    """Draws the plots of one page, with ids that are unique on the page."""

    def __init__(self) -> None:
        """Raises ConfigError if matplotlib is missing."""
        try:
            # matplotlib reads a matplotlibrc in the current folder, which may not be trusted
            with contextlib.chdir(os.path.dirname(__file__)):
                import matplotlib
        except ModuleNotFoundError:
            raise ConfigError(
                "the page's plots need matplotlib: pip install matplotlib; or nano-rl report NAME --json"
            ) from None
        self._settings: dict[str, Any] = {
            "svg.fonttype": "none",
            "svg.hashsalt": "nano",
            "text.parse_math": False,  # a name with two dollar signs is no formula
            "font.size": 9,
            "axes.edgecolor": GRID,
            "axes.labelcolor": MUTED,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": matplotlib.cycler(color=CATEGORIES),  # type: ignore[attr-defined]
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "grid.color": GRID,
            "text.color": INK,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.grid.axis": "y",
        }
        self._drawn = 0

    def curves(
        self,
        curves: Sequence[Series],
        title: str,
        *,
        labels: Sequence[str] = (),
        share: bool = False,
        small: bool = False,
        across: str = "step",
        least_span: float = 0.0,
    ) -> str:
        """Curves with bands and values under the pointer, as an SVG element.

        With `share` the axis is 0 to 1. `across` is the label of the horizontal axis. The vertical axis spans
        at least `least_span`.
        """

        def draw(axes: Axes) -> None:
            for n, curve in enumerate(curves):
                colour = CATEGORIES[n % len(CATEGORIES)]
                if len(curves) == 1 and curve.line != curve.values:
                    axes.plot(curve.steps, curve.values, color=colour, linewidth=0.6, alpha=0.5)
                marker = "o" if len(curve.steps) == 1 else ""
                axes.plot(curve.steps, curve.line, color=colour, linewidth=1.6, marker=marker, markersize=4)
                if curve.band:
                    axes.fill_between(
                        curve.steps, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0
                    )
            ends = {end for curve in curves for end in (min(curve.low), max(curve.high))}
            if len(ends) == 1 and min(ends) == 0:
                axes.set_ylim(0, 1)  # around a flat zero matplotlib would show negative values
            if share:
                axes.set_ylim(-0.02, 1.02)
                axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
            elif max(ends) - min(ends) < least_span:
                axes.set_ylim(min(0.0, *ends), min(0.0, *ends) + least_span)

        size = (3.4, 1.9) if small else (5.2, 2.5)
        return self._figure(draw, title, size=size, across=across, read=_readings(curves, labels, across))

    def calibration(self, points: Sequence[tuple[float, float, float, float]], title: str) -> str:
        """A calibration plot of (confidence, accuracy, low, high) of each bin, with the diagonal."""

        def draw(axes: Axes) -> None:
            axes.plot([0.5, 1], [0.5, 1], color=MUTED, linewidth=1, linestyle="--")
            for confidence, accuracy, low, high in points:
                axes.plot([confidence, confidence], [low, high], color=CATEGORIES[0], linewidth=1, alpha=0.6)
                axes.plot([confidence], [accuracy], color=CATEGORIES[0], marker="o", markersize=6)
            axes.set_xticks([0.5, 0.6, 0.7, 0.8, 0.9, 1], ["50 %", "60 %", "70 %", "80 %", "90 %", "100 %"])
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
            axes.set_xlim(0.48, 1.02)
            axes.set_ylim(-0.02, 1.02)

        return self._figure(draw, title, size=(5.2, 3.6), across="how sure the model is")

    def stack(self, steps: Sequence[float], parts: dict[str, Sequence[float]], title: str) -> str:
        """A stacked plot of parts over the steps."""

        def draw(axes: Axes) -> None:
            colours = CATEGORIES[: len(parts)]
            if len(steps) > 1:
                axes.stackplot(steps, *parts.values(), colors=colours, alpha=0.85)
                return
            bottom = 0.0
            for values, colour in zip(parts.values(), colours, strict=True):
                axes.bar(steps, values, bottom=bottom, color=colour, width=0.5)
                bottom += values[0]

        return self._figure(draw, title, size=(5.2, 2.5))

    def _figure(
        self,
        draw: Any,
        title: str,
        *,
        size: tuple[float, float],
        across: str = "step",
        read: Sequence[tuple[float, Sequence[str]]] = (),
    ) -> str:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        with matplotlib.rc_context(self._settings):
            figure = Figure(figsize=size, layout="constrained")
            FigureCanvasSVG(figure)
            axes = figure.add_subplot()
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=across == "step"))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
            draw(axes)
            axes.tick_params(length=0)
            axes.margins(x=0.01)
            axes.set_xlabel(across, fontsize=8)
            written = io.StringIO()
            figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
            strips = _strips(axes, read)
        self._drawn += 1
        svg = inline_svg(written.getvalue(), title, f"p{self._drawn}-")
        return svg.replace("</svg>", f"{strips}</svg>")


def _readings(
    curves: Sequence[Series], labels: Sequence[str], across: str
) -> list[tuple[float, tuple[str, ...]]]:
    """(step, lines of text) shown under the pointer at about READINGS places."""
    at: dict[float, list[str]] = {}
    for n, curve in enumerate(curves):
        name = labels[n] if labels else curve.name
        stride = -(-len(curve.steps) // READINGS)
        for step, value, low, high in list(
            zip(curve.steps, curve.values, curve.low, curve.high, strict=True)
        )[::stride]:
            around = f" ({low:.4g} to {high:.4g})" if curve.band == INTERVAL else ""
            at.setdefault(step, []).append(f"{name}: {value:.4g}{around}")
    return [(step, (f"{across} {step:.6g}", *at[step])) for step in sorted(at)]


def _strips(axes: Axes, read: Sequence[tuple[float, Sequence[str]]]) -> str:
    """A vertical strip for each reading, whose text is shown by CSS on hover, without a script."""
    from markupsafe import escape

    figure: Any = axes.figure
    points = 72 / figure.dpi
    box = axes.get_window_extent()
    height = figure.get_figheight() * 72
    left, right, top = box.x0 * points, box.x1 * points, height - box.y1 * points
    tall = f"{box.height * points:.1f}"
    places = [float(axes.transData.transform((step, 0))[0]) * points for step, _ in read]
    edges = [left, *((a + b) / 2 for a, b in pairwise(places)), right]
    strips = []
    for place, (begin, end), (_, lines) in zip(places, pairwise(edges), read, strict=False):
        text = "".join(
            f'<tspan x="{left + 4:.1f}" dy="10">{escape(printable(line))}</tspan>' for line in lines
        )
        strips.append(
            f'<g class="at"><rect x="{begin:.1f}" y="{top:.1f}" width="{max(0.0, end - begin):.1f}"'
            f' height="{tall}"/><path d="M{place:.1f} {top:.1f}v{tall}"/>'
            f'<text y="{top:.1f}">{text}</text></g>'
        )
    return "".join(strips)


def inline_svg(document: str, title: str, prefix: str) -> str:
    """A matplotlib SVG document as an element of a page, with its colours, unique ids, and a title."""
    from markupsafe import escape

    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # its style would hold for the whole page; the page has the same for plots
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}\1"', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    svg = re.sub(r'xlink:href="#', f'href="#{prefix}', svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    box = re.search(r'viewBox="[^"]*"', svg)
    head = f'<svg class="plot" role="img" aria-label="{escape(title)}" {box.group() if box else ""}>'
    return head + svg[svg.index(">") + 1 :]
