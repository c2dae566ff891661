"""The pictures of learning: success of each arm, beside its controls, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from svg import Svg
from tables import of_newest_draw, rate

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


def bars(title: str, what: str, rows: Sequence[tuple[str, str, float, Sequence[float]]]) -> str:
    """A bar for each row: its label, its colour, its length in percent, and dots on it."""
    bottom = TOP + ROW * len(rows)
    svg = Svg(WIDTH, bottom + 34, title)

    def across(percent: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * percent / 100, 1)

    svg.text(LEFT, TOP - 16, [what], small=True)
    for percent in range(0, 101, 25):
        svg.line([(across(percent), TOP), (across(percent), bottom)], "grid")
        svg.text(across(percent), bottom + 18, [str(percent)], small=True)
    for place, (label, kind, length, dots) in enumerate(rows):
        y = TOP + ROW * place + ROW / 2
        svg.text(LEFT - 12, y + 4, [label], small=True, anchor="end")
        svg.line([(across(0), y), (across(length), y)], f"curve {kind}")
        for dot in dots:
            svg.dot(across(dot), y, 3, kind)
        svg.text(RIGHT + 14, y + 4, [f"{length:.0f}"], kind=kind, anchor="start")
    return svg.end()


def loop(data: dict[str, Any]) -> str:
    """`data`: what integration/flywheel.py writes. The mean over seeds, and each seed."""
    seeds = data["rows"]
    rows = []
    for arm, (label, kind) in ARMS.items():
        values = [_success(row, arm) for row in seeds]
        rows.append((label, kind, fmean(values), values))
    title = f"success on held-out programs by what was learned from, {len(seeds)} seeds"
    what = f"success on 100 held-out programs, %; dots: each of {len(seeds)} seeds, bars: their mean"
    return bars(title, what, rows)


def _success(row: dict[str, Any], arm: str) -> float:
    if arm == "constant":
        return float(row["constant"]["programs_hindsight"])
    return float(row["arms"][arm]["programs"])


def repair(data: list[dict[str, Any]]) -> str:
    """`data`: what benchmarks/repair.py writes. Bugs that were mended, each with its 95 % interval."""
    blocks = {block["settings"]["model"]: block["rows"] for block in of_newest_draw(data)}
    trained = blocks["coder-repair"]
    solved = [bug["greedy"]["solved"] for bug in trained]
    arms = [
        ("random mutations, as many checks", "b", [bug["search"] is not None for bug in trained]),
        ("random mutations, up to twelve checks", "b", [bug["search"] is not None for bug in blocks["none"]]),
        ("trained, its first answer", "a",
         [bug["greedy"]["solved"] and bug["greedy"]["turns"] == 1 for bug in trained]),
        ("trained, the likeliest twelve answers", "a", solved),
    ]  # fmt: skip
    rows = [(f"{label} ({len(found)} bugs)", kind, *rate(found)) for label, kind, found in arms]
    title = f"bugs planted in {len({bug['package'] for bug in trained})} packages, and who mends them"
    return bars(title, "bugs mended, %; dots: the 95 % interval", rows)
