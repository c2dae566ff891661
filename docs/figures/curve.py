"""The curve of a result: held-out success over the steps of a training, with its seeds."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from svg import Svg

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 60, 510, 40, 280


def supply(data: dict[str, Any]) -> str:
    """The mean over seeds at each measured step; each seed at the first and the last step."""
    steps, seeds = data["steps"], data["rows"]
    svg = Svg(WIDTH, HEIGHT, f"success on held-out tasks over {steps[-1]} training steps, {len(seeds)} seeds")

    def place(step: float, percent: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * step / steps[-1]
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * percent / 100, 1)

    for percent in range(0, 101, 25):
        svg.line([place(0, percent), place(steps[-1], percent)], "grid")
        svg.text(LEFT - 8, place(0, percent)[1] + 4, [f"{percent} %"], small=True, anchor="end")
    for step in steps:
        svg.text(place(step, 0)[0], BOTTOM + 20, [str(step)], small=True)
    svg.text((LEFT + RIGHT) / 2, BOTTOM + 40, ["training steps"], small=True)
    what = "success on held-out tasks (200 of each kind, temperature 1)"
    svg.text(LEFT, TOP - 16, [what], small=True, anchor="start")
    for kind, name, label in (("a", "programs", "held-out programs"), ("b", "families", "held-out families")):
        for row in seeds:
            ends = [place(steps[0], row[f"{name}_before"]), place(steps[-1], row[f"{name}_after"])]
            for x, y in ends:
                svg.dot(x, y, 3, kind)
        constant = fmean(row[f"{name}_constant"] for row in seeds)
        svg.line([place(0, constant), place(steps[-1], constant)], f"constant {kind}")
        mean = [place(step, percent) for step, percent in zip(steps, data[name], strict=True)]
        svg.line(mean, f"curve {kind}")
        y = mean[-1][1] + (14 if kind == "a" else -6)
        ends_said = f"{label}: {data[name][0]} to {data[name][-1]} %"
        svg.text(RIGHT + 14, y, [ends_said], kind=kind, anchor="start")
    legend = [f"thick: mean of {len(seeds)} seeds", "dots: each seed", "dashed: best constant answer"]
    svg.text(RIGHT + 14, BOTTOM - 40, legend, small=True, anchor="start")
    return svg.end()
