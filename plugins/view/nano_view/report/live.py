"""The live view of a training on a terminal: panels that are redrawn in place."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Group as Renderables
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nano_coder.installed_views import TrainingView
from nano_rl.learn.metrics import MetricsRow
from nano_rl.training_record import KEPT, PanelLine, duration, seconds_left, with_row, written
from nano_shared.command_line import Console
from nano_view.report.panel import PANELS, band, level_lines, sparkline


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
        self._rows = with_row(self._rows, row)
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
