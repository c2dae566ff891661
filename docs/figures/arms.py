"""The arms of the flywheel side by side: the mean and the seeds of each, and the best constant answer."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from svg import Svg

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 270, 690, 40, 34
ARMS = {
    "start": "start: imitated a few oracles",
    "log": "by its own log alone",
    "trained": "and by fresh runs: GRPO",
    "imitation": "imitation of own successes",
    "oracles": "more oracles",
    "random": "random rewards",
}


def arms(data: dict[str, Any]) -> str:
    """`data`: what integration/flywheel.py writes, with all arms."""
    rows = data["rows"]
    bottom = TOP + ROW * len(ARMS)
    svg = Svg(WIDTH, bottom + 62, f"success on held-out programs by arm, {len(rows)} seeds")

    def across(percent: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * percent / 80, 1)

    for percent in range(0, 81, 20):
        svg.line([(across(percent), TOP - 8), (across(percent), bottom)], "grid")
        svg.text(across(percent), bottom + 18, [f"{percent} %"], small=True)
    constant = fmean(max(row["constant"]["programs"], row["constant"]["programs_hindsight"]) for row in rows)
    svg.line([(across(constant), TOP - 8), (across(constant), bottom)], "constant b")
    svg.text(across(constant), TOP - 14, [f"best constant answer {constant:.0f} %"], small=True)
    for index, (arm, label) in enumerate(ARMS.items()):
        y, kind = TOP + ROW * index + ROW / 2, "a" if arm in ("start", "log", "trained") else "b"
        found = [row["arms"][arm]["programs"] for row in rows]
        svg.text(LEFT - 12, y + 5, [label], kind=kind, anchor="end")
        svg.line([(across(0), y), (across(fmean(found)), y)], f"bar {kind}")
        for one in found:
            svg.dot(across(one), y, 3, "line")
        svg.text(RIGHT + 10, y + 5, [f"{fmean(found):.0f} %"], kind=kind, anchor="start")
    what = f"success on held-out programs, temperature 1; bars: mean of {len(rows)} seeds, dots: each seed"
    svg.text((LEFT + RIGHT) / 2 - 60, bottom + 44, [what], small=True)
    return svg.end()
