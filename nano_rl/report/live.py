"""The live view of a training (panels on a terminal, lines elsewhere), and the callbacks that feed it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Group as Renderables
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nano_rl.learn.metrics import MetricsRow
from nano_rl.learn.rows.group import Group
from nano_rl.record import ROLLOUTS, EventKind, RolloutsWriter, note
from nano_rl.report.panel import (  # fmt: skip
    PANELS,
    PanelLine,
    band,
    duration,
    level_lines,
    seconds_left,
    sparkline,
    written,
)
from nano_rl.report.sinks import Sink
from nano_shared.console import Console
from nano_shared.errors import GuardTripped
from nano_shared.types import Trajectory

KEPT = 200
"""number of rows kept for sparklines and the estimate of the remaining time"""


class TrainingView:
    """A view of a running training that shows nothing; the base of those that do.

    A context manager, which owns the terminal until it exits.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run_done(self) -> None:
        """Called when a rollout of the current step has ended."""

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        """Called when a step has ended, with its metrics."""


def open_view(
    name: str, total: int, rows: list[MetricsRow], *, console: Console | None = None
) -> TrainingView:
    """Panels on a terminal, lines elsewhere; on stderr unless a console is given. `rows`: metrics so far."""
    console = console or Console(stderr=True)
    return LiveView(name, total, rows, console) if console.is_terminal else LinesView(name, total, rows)


def _with(rows: list[MetricsRow], row: Mapping[str, float]) -> list[MetricsRow]:
    """The rows with the new one appended; rows of the same and later steps are replaced."""
    step = row.get("step", math.inf)
    return [*(r for r in rows if (r.get("step") or 0) < step), dict(row)][-KEPT:]


class LiveView(TrainingView):
    """Panels that are redrawn in place, twice a second."""

    def __init__(self, name: str, total: int, rows: list[MetricsRow], console: Console) -> None:
        self._name = name
        self._total = total
        self._done = len(rows)
        self._rows = rows[-KEPT:]
        self._running = 0
        """number of rollouts that have ended in the current step"""
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

    def render(self) -> Renderables:
        """The head with a progress bar, and the panels in columns."""
        last = self._rows[-1] if self._rows else {}
        panels = []
        for heading, lines in PANELS.items():
            levels = level_lines(last) if heading == "Reward" else ()
            table = self._panel(heading, (*lines[:2], *levels, *lines[2:]), last)
            if table.row_count:
                panels.append(table)
        return Renderables(self._head(), Columns(panels, padding=(0, 4)))

    def _head(self) -> Renderables:
        left = seconds_left(self._rows, self._done, self._total)
        text = Text.assemble(
            ("training ", "dim"), (self._name, "bold"), ("   step ", "dim"), f"{self._done}/{self._total}",
            ("   elapsed ", "dim"), duration(time.monotonic() - self._began),
            ("   left ", "dim"), "-" if left is None else duration(left),
            ("   rollouts in this step ", "dim"), str(self._running),
        )  # fmt: skip
        return Renderables(text, ProgressBar(total=self._total, completed=self._done, width=60), "")

    def _panel(self, heading: str, lines: tuple[PanelLine, ...], last: Mapping[str, float | None]) -> Table:
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


class LinesView(TrainingView):
    """One line per step on stderr, for logs and pipes."""

    def __init__(self, name: str, total: int, rows: list[MetricsRow]) -> None:
        self._name = name
        self._total = total
        self._rows = rows[-KEPT:]

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


class Watcher:
    """The callbacks of `train`, and a context manager that records how it ends as an event."""

    def __init__(self, folder: Path, view: TrainingView, sinks: Sequence[Sink], *, done: int) -> None:
        """`done` is the number of steps whose metrics are in the folder already."""
        self._folder = folder
        self._view = view
        self._sinks = sinks
        self._rollouts = RolloutsWriter(folder / ROLLOUTS)
        self._done = done
        self.last: dict[str, float] = {}
        """metrics of the last step in this process"""

    def on_run(self, run: Trajectory) -> None:
        self._view.run_done()

    def on_groups(self, step: int, groups: Sequence[Group], controls: Sequence[Trajectory]) -> None:
        self._rollouts.write(step, groups, controls)

    def on_step(self, done: int, total: int, values: dict[str, float]) -> None:
        self._done, self.last = done, dict(values)
        finite = {name: value for name, value in values.items() if math.isfinite(value) and name != "step"}
        for sink in self._sinks:
            sink.write(done - 1, finite)
        self._view.step_done(done, total, values)

    def __enter__(self) -> Self:
        note(self._folder, EventKind.RESUMED if self._done else EventKind.STARTED, self._done)
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.__exit__(kind, error, trace)
        self._rollouts.close()
        for sink in self._sinks:
            sink.close()
        if isinstance(error, GuardTripped):
            note(self._folder, EventKind.GUARD, self._done, str(error))
        elif error is not None:
            note(self._folder, EventKind.STOPPED, self._done, str(error) or type(error).__name__)
        else:
            note(self._folder, EventKind.FINISHED, self._done)
