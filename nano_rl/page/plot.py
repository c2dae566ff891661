"""Plots as SVG that takes its colours and its font from the page, so that dark mode and print reach it.

Matplotlib knows no CSS variables: it draws in placeholder colours, which are replaced afterwards.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nano_rl.page.series import Series
from nano_shared.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, GRID = "#0a0b01", "#0a0b02", "#0a0b03"
CATEGORIES = tuple(f"#0a0b1{n}" for n in range(8))
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    colour: f"var(--c{n})" for n, colour in enumerate(CATEGORIES)
}


class Plotter:
    """Draws plots for one page; the ids within each are its own."""

    def __init__(self) -> None:
        """Raises ConfigError where matplotlib is missing."""
        try:
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
        share: bool = False,
        small: bool = False,
        across: str = "step",
    ) -> str:
        """Curves of one axis with their bands, as an SVG element; a `share` is drawn from 0 to 1. `across`
        names what the curves' steps are."""

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

        return self._figure(draw, title, size=(3.4, 1.9) if small else (5.2, 2.5), across=across)

    def calibration(self, points: Sequence[tuple[float, float, float, float]], title: str) -> str:
        """(confidence, accuracy, low, high) of each bin against the diagonal, on which both agree."""

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
        """Parts of a whole over the steps, on top of each other."""

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

    def _figure(self, draw: Any, title: str, *, size: tuple[float, float], across: str = "step") -> str:
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
        self._drawn += 1
        return inline_svg(written.getvalue(), title, f"p{self._drawn}-")


def inline_svg(document: str, title: str, prefix: str) -> str:
    """A matplotlib SVG document as an element for a page: colours of the page, ids of its own, a name."""
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
