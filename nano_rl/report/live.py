"""The live view of a training: panels on a terminal, a line a step where there is none."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nano_rl.learn.metrics import Row
from nano_rl.report.panel import (  # fmt: skip
    PANELS,
    Line,
    band,
    duration,
    level_lines,
    seconds_left,
    sparkline,
    written,
)
from nano_shared.console import Console

KEPT = 200
"""rows kept for sparklines and the time that is left"""


class View(Protocol):
    """Shows a training while it goes on. A context manager: the terminal is its own in between."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def run_done(self) -> None:
        """A rollout of the step in flight has ended."""

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        """A step has ended; `row` are its metrics."""


def open_view(name: str, total: int, rows: list[Row], *, console: Console | None = None) -> View:
    """Panels on a terminal, lines elsewhere; on stderr unless a console is given. `rows`: those so far."""
    console = console or Console(stderr=True)
    return LiveView(name, total, rows, console) if console.is_terminal else LinesView(name, total, rows)


def _with(rows: list[Row], row: Mapping[str, float]) -> list[Row]:
    """The rows and the new one, which replaces those of a process that was killed after its last state."""
    step = row.get("step", math.inf)
    return [*(r for r in rows if (r.get("step") or 0) < step), dict(row)][-KEPT:]


class LiveView:
    """Panels that are redrawn in place, several times a second."""

    def __init__(self, name: str, total: int, rows: list[Row], console: Console) -> None:
        self._name = name
        self._total = total
        self._done = len(rows)
        self._rows = rows[-KEPT:]
        self._running = 0
        """rollouts that have ended in the step in flight"""
        self._began = time.monotonic()
        self._live = Live(
            console=console, get_renderable=self.render, refresh_per_second=2, transient=False,
            redirect_stdout=False, vertical_overflow="crop",
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def run_done(self) -> None:
        self._running += 1

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        self._rows = _with(self._rows, row)
        self._done, self._total, self._running = done, total, 0
        self._live.refresh()

    def render(self) -> Group:
        """The head with its bar, and the panels beside each other where the terminal is wide enough."""
        last = self._rows[-1] if self._rows else {}
        panels = []
        for heading, lines in PANELS.items():
            levels = level_lines(last) if heading == "Reward" else ()
            table = self._panel(heading, (*lines[:2], *levels, *lines[2:]), last)
            if table.row_count:
                panels.append(table)
        return Group(self._head(), Columns(panels, padding=(0, 4)))

    def _head(self) -> Group:
        left = seconds_left(self._rows, self._done, self._total)
        text = Text.assemble(
            ("training ", "dim"), (self._name, "bold"), ("   step ", "dim"), f"{self._done}/{self._total}",
            ("   elapsed ", "dim"), duration(time.monotonic() - self._began),
            ("   left ", "dim"), "-" if left is None else duration(left),
            ("   rollouts in this step ", "dim"), str(self._running),
        )  # fmt: skip
        return Group(text, ProgressBar(total=self._total, completed=self._done, width=60), "")

    def _panel(self, heading: str, lines: tuple[Line, ...], last: Mapping[str, float | None]) -> Table:
        table = Table(title=heading, title_justify="left", title_style="bold", box=None, show_header=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="cyan", no_wrap=True)
        for line in lines:
            if line.metric in last:
                beside = band(line, last)
                drawn = sparkline([row.get(line.metric) for row in self._rows], width=16)
                table.add_row(line.label, written(line, last), f"{drawn} {beside}".rstrip())
        return table


class LinesView:
    """One plain line a step on stderr, for logs and pipes."""

    def __init__(self, name: str, total: int, rows: list[Row]) -> None:
        self._name = name
        self._total = total
        self._rows = rows[-KEPT:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run_done(self) -> None:
        pass

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        self._rows = _with(self._rows, row)
        shown = [
            f"{line.label.strip()} {written(line, row)}"
            for panel in ("Reward", "Objective")
            for line in PANELS[panel]
            if line.metric in row and line.metric in _IN_LINES
        ]
        left = seconds_left(self._rows, done, total)
        parts = [f"step {done}/{total}", *shown, f"left {duration(left or 0)}"]
        print("  ".join(parts), file=sys.stderr, flush=True)


_IN_LINES = {"reward_mean", "success/all", "frac_zero_std", "entropy", "loss", "grad_norm", "ess", "stale"}


class NoView:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run_done(self) -> None:
        pass

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        pass
