"""The picture of the first page: held-out success of each arm of the loop, beside its controls."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from svg import Svg

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 330, 690, 40, 30
ARMS = {
    "start": ("untrained: a warm start by imitation", "b"),
    "constant": ("best constant answer, told the place, in hindsight", "b"),
    "random": ("the same training on random rewards", "b"),
    "log": ("its log alone: 512 runs, the successes imitated", "a"),
    "trained": ("and then GRPO on 1,024 fresh runs", "a"),
    "imitation": ("its log alone: 1,536 runs, the successes imitated", "a"),
    "oracles": ("oracles imitated, equal tokens", "b"),
}
"""arm -> what it is, and its colour: what the policy learned from its own runs, and what stands beside it"""


def loop(data: dict[str, Any]) -> str:
    """`data`: what integration/flywheel.py writes. The mean over seeds, and each seed."""
    seeds = data["rows"]
    bottom = TOP + ROW * len(ARMS)
    svg = Svg(
        WIDTH, bottom + 34, f"success on held-out programs by what was learned from, {len(seeds)} seeds"
    )

    def across(percent: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * percent / 100, 1)

    what = f"success on 100 held-out programs, %; dots: each of {len(seeds)} seeds, bars: their mean"
    svg.text(LEFT, TOP - 16, [what], small=True)
    for percent in range(0, 101, 25):
        svg.line([(across(percent), TOP), (across(percent), bottom)], "grid")
        svg.text(across(percent), bottom + 18, [str(percent)], small=True)
    for place, (arm, (label, kind)) in enumerate(ARMS.items()):
        y = TOP + ROW * place + ROW / 2
        values = [_success(row, arm) for row in seeds]
        svg.text(LEFT - 12, y + 4, [label], small=True, anchor="end")
        svg.line([(across(0), y), (across(fmean(values)), y)], f"curve {kind}")
        for value in values:
            svg.dot(across(value), y, 3, kind)
        svg.text(RIGHT + 14, y + 4, [f"{fmean(values):.0f}"], kind=kind, anchor="start")
    return svg.end()


def _success(row: dict[str, Any], arm: str) -> float:
    if arm == "constant":
        return float(row["constant"]["programs_hindsight"])
    return float(row["arms"][arm]["programs"])
