"""A page on a reward model: held-out accuracy, and how often it is right when it is so and so sure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nano_rl.checkpoints.statistics import wilson
from nano_rl.report.page import fill
from nano_rl.report.plot import Plotter

if TYPE_CHECKING:
    from nano_rl.preferences.reward_model import Report


def calibration_page(name: str, report: Report, plotter: Plotter) -> str:
    """The page as text; it loads nothing from elsewhere."""
    points = [
        (bin.confidence, bin.accuracy, *wilson(round(bin.accuracy * bin.pairs), bin.pairs))
        for bin in report.bins
    ]
    plot = plotter.calibration(points, f"Calibration of reward model {name}")
    return fill("calibration.html.j2", name=name, report=report, plot=plot)
