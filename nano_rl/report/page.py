"""The HTML report of a training, of a comparison, and of a reward model's calibration."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nano_rl.checkpoints.statistics import wilson
from nano_rl.learn.metrics import MetricsRow
from nano_rl.preferences.over_optimisation import over_optimised
from nano_rl.report.figures import compared_plots, main_plots, other_plots
from nano_rl.report.panel import duration, interval_of, seconds_of, sparkline
from nano_rl.report.plot import Plotter
from nano_rl.report.training import Training
from nano_rl.report.transcript import CERTAINTIES, cut
from nano_shared.printable import printable

if TYPE_CHECKING:
    from nano_rl.preferences.reward_model import RewardModelReport


PAGE = "report.html"
"""file name in the folder of a training"""
COMPARISON = "comparison.html"
"""file name in the folder of the first of several trainings"""
_HERE = Path(__file__).parent


def write_page(training: Training, path: Path) -> None:
    """Write the report of a training to `path`. Raises ConfigError if matplotlib is missing."""
    _write(render(training), path)


def _write(text: str, path: Path) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(text, encoding="utf-8", newline="\n")
    os.replace(scratch, path)


def render(training: Training) -> str:
    """The report page as HTML."""
    plotter = Plotter()
    return fill(
        "page.html.j2",
        training=training,
        tiles=_tiles(training),
        main=main_plots(training.rows, plotter, training.held_out),
        others=other_plots(training.rows, plotter),
        table=_table(training),
        zeros=_zeros(training),
        over_optimised=over_optimised(training.rows),
        bounds=CERTAINTIES,
        made=time.time(),
    )


def write_comparison(trainings: Sequence[Training], path: Path) -> None:
    """Write a page that compares several trainings. Raises ConfigError if matplotlib is missing."""
    curves = [(training.name, training.rows, training.held_out) for training in trainings]
    plots = compared_plots(curves, Plotter())
    settings = _differing(trainings)
    _write(
        fill("compare.html.j2", trainings=trainings, plots=plots, settings=settings, made=time.time()), path
    )


def _differing(trainings: Sequence[Training]) -> list[tuple[str, list[str]]]:
    """The settings that differ between the trainings, with the value of each."""
    told = [
        {f"{section}.{name}".lstrip("."): value for section, rows in t.settings for name, value, _ in rows}
        | ({"model": t.record.model, "tasks": str(t.record.tasks)} if t.record else {})
        for t in trainings
    ]
    names = sorted({name for values in told for name in values})
    rows = [(name, [values.get(name, "-") for values in told]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def fill(template: str, **values: Any) -> str:
    """Render a template of this folder, with all values escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "visible": printable, "cut": cut, "duration": duration, "when": _when, "percent": _percent,
        "number": _number, "ends": _ends, "svg": Markup,
    }  # fmt: skip
    style = Markup((_HERE / "style.css").read_text(encoding="utf-8"))
    return environment.get_template(template).render(style=style, **values)


def _tiles(training: Training) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the figures at the top."""
    rows, first, last = training.rows, training.rows[0], training.rows[-1]
    tiles = [("steps", str(int(last.get("step") or 0) + 1), "")]
    for label, name, form in (("reward", "reward_mean", ".3f"), ("success", "success/all", ".1%")):
        begin, end = first.get(name), last.get(name)
        if end is not None:
            interval = interval_of(name, last)
            told = "" if interval is None else "95 %: {} to {}".format(*(format(x, form) for x in interval))
            since = "" if begin is None else f"{format(begin, form)} at first. "
            tiles.append((f"{label} in the last step", format(end, form), since + told))
    tokens = sum(row.get("tokens_rollout") or 0 for row in rows)
    tiles.append(("time in the steps", duration(sum(seconds_of(row) for row in rows)), ""))
    if tokens:
        tiles.append(("tokens sampled", f"{tokens:,.0f}", ""))
    total = training.hacks_total
    tiles.append(("tampered rollouts", str(total.tampered), f"of {total.rollouts}"))
    return tiles


def _table(training: Training) -> list[tuple[str, str, str, str, str]]:
    """(metric, first, last, mean, sparkline) of each metric that was not always 0."""
    table = []
    for name in sorted({name for row in training.rows for name in row} - {"step"}):
        values = [row.get(name) for row in training.rows]
        known = [value for value in values if value is not None]
        if any(known):
            mean = sum(known) / len(known)
            ends = (_number(known[0]), _number(known[-1]), _number(mean))
            table.append((name, *ends, sparkline(values, width=40)))
    return table


def _zeros(training: Training) -> list[str]:
    """The metrics that were 0 in every step."""
    names = sorted({name for row in training.rows for name in row} - {"step"})
    return [name for name in names if not any(row.get(name) for row in training.rows)]


def _ends(rows: Sequence[MetricsRow], name: str) -> str:
    """The first and last value of a metric, as text."""
    known = [value for row in rows if (value := row.get(name)) is not None]
    return f"{_number(known[0])} to {_number(known[-1])}" if known else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _when(seconds: float) -> Any:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def calibration_page(name: str, report: RewardModelReport, plotter: Plotter) -> str:
    """The calibration page of a reward model as HTML, without external resources."""
    points = [
        (bin.confidence, bin.accuracy, *wilson(round(bin.accuracy * bin.pairs), bin.pairs))
        for bin in report.bins
    ]
    plot = plotter.calibration(points, f"Calibration of reward model {name}")
    return fill("calibration.html.j2", name=name, report=report, plot=plot)
