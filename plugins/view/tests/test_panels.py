"""The live view of a training on a terminal: sparklines, intervals, panels."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nano_rl.learn.metrics import MetricsRow
from nano_rl.training_record import PanelLine, open_view
from nano_view.report.live import LiveView
from nano_view.report.panel import band, interval_of, sparkline

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.none() | st.floats(), max_size=60), st.integers(1, 30))
def test_a_sparkline_has_a_character_a_value(values: list[float | None], width: int) -> None:
    drawn = sparkline(values, width=width)
    known = [v for v in values[-width:] if v is not None and math.isfinite(v)]
    assert len(drawn) == (min(len(values), width) if known else 0)


@given(st.lists(FINITE, min_size=2, max_size=20))
def test_a_sparkline_rises_and_falls_with_its_values(values: list[float]) -> None:
    drawn = sparkline(values)
    assert drawn[values.index(min(values))] == min(drawn) == "▁"
    if max(values) / 2 - min(values) / 2 > 1e-6 * max(map(abs, values)):
        assert drawn[values.index(max(values))] == "█"


def test_intervals_are_told_where_a_step_tells_enough() -> None:
    row: MetricsRow = {
        "reward_mean": 0.5,
        "reward_error": 0.1,
        "success/all": 0.5,
        "graded/all": 8.0,
        "loss": 1.0,
    }
    low, high = interval_of("reward_mean", row) or (0, 0)
    assert (low, high) == pytest.approx((0.304, 0.696), abs=1e-3)
    assert band(PanelLine("success/all", "", ".0%"), row) == "22% to 78%"
    assert interval_of("loss", row) is None
    assert interval_of("reward_mean", {"reward_mean": 0.5}) is None


ROW = {
    "reward_mean": 0.625, "reward_error": 0.05, "success/all": 0.5, "graded/all": 8.0,
    "success/level_2": 0.25, "graded/level_2": 4.0, "entropy": 0.7, "grad_norm": 1.5,
    "tokens_per_second_train": 1234.0,
    "seconds_rollout": 3.0, "seconds_train": 2.0, "stale": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("width", [50, 200])
def test_the_live_view_shows_the_last_step_on_any_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=80, force_terminal=True)
    view = open_view("mine", 10, [], console=console)
    assert isinstance(view, LiveView)
    with view:
        view.run_done()
        view.step_done(4, 10, ROW)
    with console.capture() as capture:
        console.print(view.render())
    shown = capture.get()
    for part in ("mine", "4/10", "0.625", "0.527 to 0.723", "level 2", "25.0%", "1234", "stale tokens"):
        assert part in shown
    assert "0:30" in shown, "six steps of five seconds are left"
