"""What the viewer shows of a training, of several side by side, and of a reward model's calibration.

A page is a dictionary of `about`, `tiles` (label, value, remark) and `sections`, which the script of
`nano-coder view` lays out: each has a title, and a note, an alert, plots, tables or lines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nano_rl.checkpoints.evaluate import wilson
from nano_rl.learn.metrics import METRICS, MetricsRow
from nano_rl.training_record import duration, seconds_of
from nano_shared.errors import UsageError
from nano_shared.files import checkpoints_dir
from nano_view.report.figures import compared_plots, main_plots, other_plots, with_hours
from nano_view.report.hacks import HackRow
from nano_view.report.panel import interval_of, sparkline
from nano_view.report.training import Rate, RateRow, Training, over_optimised, read_training

Shown = dict[str, Any]
_CUT = 20_000
"""characters of a setting that are shown"""


class Trainings:
    """The trainings in NANO_HOME, for `nano-coder view`; read anew at every call."""

    def _all(self) -> dict[str, Path]:
        """Name -> folder, newest first; only those that have finished a step."""
        paths = (checkpoints_dir().parent / "trainings").glob(f"*/{METRICS}")
        found = sorted(((p.stat().st_mtime, p.parent) for p in paths if p.stat().st_size), reverse=True)
        return {folder.name: folder for _, folder in found}

    def rows(self) -> list[Shown]:
        rows = []
        for name, folder in self._all().items():
            try:
                rows.append(training_row(read_training(folder)))
            except UsageError as problem:
                rows.append({"name": name, "cells": training_cells(None) | {"steps": str(problem)[:200]}})
        return rows

    def read(self, name: str) -> Shown:
        return training_page(read_training(self._folder(name)))

    def compare(self, names: Sequence[str]) -> Shown:
        return comparison_page([read_training(self._folder(name)) for name in names])

    def _folder(self, name: str) -> Path:
        known = self._all()
        if name not in known:
            raise UsageError(f"no training {name!r:.100}; trainings: {', '.join(known) or 'none'}")
        return known[name]


TRAININGS = Trainings()


def training_row(t: Training) -> Shown:
    return {"name": t.name, "cells": training_cells(t)}


def training_cells(t: Training | None) -> dict[str, str]:
    """Heading -> text of a training in a list; dashes for one that cannot be read."""
    if t is None:
        return dict.fromkeys(("model", "steps", "reward", "success", "held-out success"), "-")
    return {
        "model": (t.record and t.record.model) or "-",
        "steps": str(len(t.rows)),
        "reward": _ends(t.rows, "reward_mean"),
        "success": _ends(t.rows, "success/all"),
        "held-out success": _ends(t.held_out, "success"),
    }


# --------------------------------------------------------------------------------------- a training


def training_page(t: Training, missing: Mapping[str, str] = MappingProxyType({})) -> Shown:
    """Curves, success, guards, hacking, rollouts, settings and all metrics of one training.

    `missing` says of rollouts, by id, why they cannot be shown.
    """
    warning = over_optimised(t.rows)
    curves = {"title": "Curves", "plots": with_hours(main_plots(t.rows, t.held_out), {"": t.rows})}
    sections = [
        curves | ({"alert": warning.sentence} if warning else {}),
        _success(t), _events(t), _hacks(t), _rollouts(t, missing), _settings(t), _metrics(t),
        {"title": "Curves of the other metrics", "folded": True, "minor": True, "plots": other_plots(t.rows)},
    ]  # fmt: skip
    return {"about": _about(t), "tiles": _tiles(t), "sections": sections}


def _about(t: Training) -> str:
    if t.record is None:
        return "a training of an earlier version, which recorded no settings"
    fresh = f" and {t.record.fresh} fresh rollouts a group" if t.record.fresh else ""
    source = f"the log{fresh}" if t.record.from_logs else f"fresh rollouts of {t.record.tasks or ''}"
    return f"{t.record.model}, trained on {source}; nano {t.record.nano}, started {_when(t.record.started)}"


def _tiles(t: Training) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the figures at the top."""
    first, last = t.rows[0], t.rows[-1]
    tiles = [("steps", str(int(last.get("step") or 0) + 1), "")]
    for label, name, form in (("reward", "reward_mean", ".3f"), ("success", "success/all", ".1%")):
        begin, end = first.get(name), last.get(name)
        if end is not None:
            interval = interval_of(name, last)
            bounds = "" if interval is None else "95 %: {} to {}".format(*(format(x, form) for x in interval))
            since = "" if begin is None else f"{format(begin, form)} at first. "
            tiles.append((f"{label} in the last step", format(end, form), since + bounds))
    tokens = sum(row.get("tokens_rollout") or 0 for row in t.rows)
    tiles.append(("time in the steps", duration(sum(seconds_of(row) for row in t.rows)), ""))
    if tokens:
        tiles.append(("tokens sampled", f"{tokens:,.0f}", ""))
    total = t.hacks_total
    return [*tiles, ("tampered rollouts", str(total.tampered), f"of {total.rollouts}")]


def _success(t: Training) -> Shown:
    kinds = (("By level", t.levels), ("By family", t.families))
    head = ["of", "first quarter", "last quarter", "all steps"]
    tables = [_table(title, head, list(map(_rates, rows))) for title, rows in kinds if rows]
    if not tables:
        return {"title": "Success", "note": "No rollout is recorded, or nothing was graded."}
    note = (
        "Share of the graded rollouts that pass, with the 95 % interval (Wilson); the quarters are of the"
        " steps. A curriculum draws harder tasks on the way."
    )
    return {"title": "Success", "note": note, "tables": tables}


def _rates(row: RateRow) -> list[str]:
    return [row.name, *map(_rate, (row.first, row.last, row.all))]


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return "-"
    low, high = rate.interval
    return f"{rate.rate:.1%} ({rate.successes}/{rate.graded}, {low:.1%} to {high:.1%})"


def _events(t: Training) -> Shown:
    lines = [
        {
            "text": f"{_when(e.time)}, {e.step} steps done: {e.kind}{': ' if e.text else ''}{e.text}",
            "bad": e.kind in ("guard", "stopped"),
        }
        for e in t.events
    ]
    skipped = sum(bool(row.get("skipped")) for row in t.rows)
    note = f"{skipped} of {len(t.rows)} steps had no group with a signal, and changed no weight."
    return {"title": "Guards and events", "note": note, "lines": lines}


def _hacks(t: Training) -> Shown:
    spans = [f"{row.first_step} to {row.last_step}" for row in t.hacks]
    rows = [hack_cells(s, row) for s, row in zip([*spans, "all"], [*t.hacks, t.hacks_total], strict=True)]
    none = "No impossible control was rolled out; nano-rl train --set controls=0.03 measures hacking on them."
    note = "" if t.hacks_total.controls else none
    return {"title": "Hacking", "note": note, "tables": [_table("Hacking by steps", HACK_HEAD, rows)]}


HACK_HEAD = ("steps", "rollouts", "tampered", "kinds", "controls", "passed", "95 % interval")


def hack_cells(steps: str, row: HackRow) -> list[str]:
    low, high = row.interval
    kinds = ", ".join(f"{kind} {count}" for kind, count in row.kinds.items()) or "-"
    interval = f"{low:.1%} to {high:.1%}" if row.controls else "-"
    return [steps, *map(str, (row.rollouts, row.tampered, kinds, row.controls, row.passes)), interval]


def _rollouts(t: Training, missing: Mapping[str, str]) -> Shown:
    if not t.chosen:
        return {"title": "Rollouts", "note": "No rollout is recorded, so none can be shown."}
    rows = [
        [c.why if c.rollout.id in missing else {"run": c.rollout.id, "text": c.why}, str(c.step),
         _number(c.rollout.reward), "-" if c.rollout.level is None else str(c.rollout.level),
         c.rollout.family or "-"]
        for c in t.chosen
    ]  # fmt: skip
    return {
        "title": "Rollouts",
        "lines": [
            {"text": f"The run {run} is not shown: {why}", "bad": False} for run, why in missing.items()
        ],
        "tables": [_table("Rollouts", ["rollout", "step", "reward", "level", "family"], rows)],
    }


def _settings(t: Training) -> Shown:
    if not t.settings:
        return {"title": "Settings", "note": "No settings are recorded."}
    tables = [
        _table(section or "training", ["setting", "value"], [_setting(*row) for row in rows])
        for section, rows in t.settings
    ]
    note = "Those that differ from the defaults are marked."
    return {"title": "Settings", "note": note, "folded": True, "tables": tables}


def _setting(name: str, value: str, changed: bool) -> list[Any]:
    return [name, {"text": value[:_CUT]} if changed else value[:_CUT]]


def _metrics(t: Training) -> Shown:
    """First, last, mean and sparkline of each metric that was not always 0, and the names of the others."""
    names = sorted({name for row in t.rows for name in row} - {"step"})
    rows, zeros = [], []
    for name in names:
        values = [row.get(name) for row in t.rows]
        known = [value for value in values if value is not None]
        if not any(known):
            zeros.append(name)
            continue
        mean = sum(known) / len(known)
        rows.append([name, *map(_number, (known[0], known[-1], mean)), sparkline(values, width=40)])
    note = f"0 in every step: {', '.join(zeros)}" if zeros else ""
    table = _table("All metrics", ["metric", "first", "last", "mean", "course"], rows, numeric=True)
    return {"title": "All metrics", "note": note, "tables": [table]}


# ---------------------------------------------------------------------------------- side by side


def comparison_page(trainings: Sequence[Training]) -> Shown:
    """One curve a training for the main metrics, and the settings in which they differ."""
    names = [t.name for t in trainings]
    plots = compared_plots([(t.name, t.rows, t.held_out) for t in trainings])
    plots = with_hours(plots, {t.name: t.rows for t in trainings})
    rows = [[t.name, *training_cells(t).values()] for t in trainings]
    all_settings = _side_by_side(trainings)
    differing = [row for row in all_settings if len(set(row[1:])) > 1]
    settings = {"tables": [_table("Settings that differ", ["setting", *names], differing)]}
    whole = _table("All settings", ["setting", *names], all_settings)
    return {
        "about": "trainings side by side",
        "tiles": [],
        "sections": [
            {
                "title": "Trainings",
                "tables": [_table("Trainings", ["training", *training_cells(None)], rows)],
            },
            {"title": "Curves", "plots": plots},
            {"title": "Settings that differ", **(settings if differing else {"note": "None."})},
            {"title": "All settings", "folded": True, "tables": [whole]},
        ],
    }


def _side_by_side(trainings: Sequence[Training]) -> list[list[str]]:
    """A setting, and its value in each training."""
    settings: list[Mapping[str, str]] = [
        {f"{section}.{name}".lstrip("."): value for section, rows in t.settings for name, value, _ in rows}
        | ({"model": t.record.model or "-", "tasks": str(t.record.tasks)} if t.record else {})
        for t in trainings
    ]
    names = sorted({name for values in settings for name in values})
    return [[name, *(values.get(name, "-")[:_CUT] for values in settings)] for name in names]


# ----------------------------------------------------------------------------------- calibration


def calibration_page(report: Any) -> Shown:
    """How often a reward model is right when it is so sure."""
    bins = report.bins
    bounds = [wilson(round(b.accuracy * b.pairs), b.pairs) for b in bins]
    accuracy = tuple(b.accuracy for b in bins)
    curve = {
        "name": "right", "steps": tuple(b.confidence for b in bins), "values": accuracy, "line": accuracy,
        "low": tuple(low for low, _ in bounds), "high": tuple(high for _, high in bounds), "band": "",
    }  # fmt: skip
    plot = {
        "title": "Calibration", "about": "bars: 95 % intervals; dashed: as often right as it says",
        "across": "how sure the model is", "share": True, "span": 0, "points": True, "diagonal": True,
        "curves": [curve],
    }  # fmt: skip
    rows = [
        [f"{b.low:.1%} to {b.high:.1%}", str(b.pairs), f"{b.confidence:.1%}", f"{b.accuracy:.1%}"]
        for b in bins
    ]
    table = _table("By bin", ["sure by", "pairs", "mean confidence", "right"], rows, numeric=True)
    return {
        "about": f"Measured on {report.pairs} pairs of prompts that it was not trained on.",
        "tiles": [
            ("accuracy", f"{report.accuracy:.1%}", "a coin: 50 %"),
            ("expected calibration error", _number(report.calibration_error), "0 is perfect"),
            ("log loss", _number(report.log_loss), "nats a pair; a coin: 0.693"),
        ],
        "sections": [{"title": "Calibration", "plots": [plot] if bins else [], "tables": [table]}],
    }


def _table(caption: str, head: Sequence[str], rows: Sequence[Any], *, numeric: bool = False) -> Shown:
    return {"caption": caption, "head": list(head), "rows": rows, "numeric": numeric}


def _ends(rows: Sequence[MetricsRow], name: str) -> str:
    """The first and last value of a metric, as text."""
    known = [value for row in rows if (value := row.get(name)) is not None]
    return f"{_number(known[0])} to {_number(known[-1])}" if known else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
