"""The figures of docs/results.md: success against staleness, and steps an hour, measured and predicted."""

from __future__ import annotations

from typing import Any

from svg import Svg

LEFT, RIGHT, TOP, BOTTOM = 60, 470, 40, 260


def _axes(svg: Svg, highest: float, unit: str, what: str) -> None:
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = BOTTOM - (BOTTOM - TOP) * share
        svg.line([(LEFT, y), (RIGHT, y)], "grid")
        svg.text(LEFT - 8, y + 4, [f"{highest * share:g}{unit}"], small=True, anchor="end")
    svg.text(LEFT, TOP - 16, [what], small=True, anchor="start")


def staleness(data: dict[str, Any]) -> str:
    """Held-out success at the end against the age of the rollouts: the mean over seeds, and each seed."""
    rows = data["rows"]
    (start,) = (row for row in rows if row["kind"] == "start")
    ages = sorted({row["age"] for row in rows if row["kind"] == "clip"})
    seeds = len(start["seeds"])
    svg = Svg(720, 310, f"success on held-out tasks against the age of the rollouts, {seeds} seeds")
    _axes(svg, 100, " %", f"success on held-out programs after {data['steps']} steps")

    def place(at: int, percent: float) -> tuple[float, float]:
        x = LEFT + 20 + (RIGHT - LEFT - 40) * at / (len(ages) - 1)
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * percent / 100, 1)

    for at, age in enumerate(ages):
        svg.text(place(at, 0)[0], BOTTOM + 20, [str(age)], small=True)
    svg.text((LEFT + RIGHT) / 2, BOTTOM + 40, ["steps between sampling and training"], small=True)
    level = place(0, start["success"])[1]
    svg.line([(LEFT, level), (RIGHT, level)], "line")
    svg.text(RIGHT + 14, level + 4, [f"before training: {start['success']} %"], small=True, anchor="start")
    for letter, kind in (("a", "clip"), ("b", "no clip")):
        of = {row["age"]: row for row in rows if row["kind"] == kind}
        means = [place(at, of[age]["success"]) for at, age in enumerate(ages)]
        svg.line(means, f"curve {letter}")
        for at, age in enumerate(ages):
            for percent in of[age]["seeds"]:
                svg.dot(*place(at, percent), 3, letter)
        y = TOP + (10 if letter == "a" else 34)
        svg.text(
            RIGHT + 14, y, [{"clip": "clipped", "no clip": "not clipped"}[kind]], kind=letter, anchor="start"
        )
    svg.text(
        RIGHT + 14, TOP + 58, ["lines: mean of the seeds", "dots: each seed"], small=True, anchor="start"
    )
    return svg.end()


def engines(data: dict[str, Any]) -> str:
    """Steps an hour over the number of engines: dots as measured, lines as simulated."""
    rows = data["rows"]
    highest = max(max(row["steps_an_hour"], row["said"]["steps_an_hour"]) for row in rows)
    top = 100 * (int(highest / 100) + 1)
    most = max(row["engines"] for row in rows)
    svg = Svg(720, 310, f"training steps an hour with 1 to {most} engines, measured and simulated")
    _axes(svg, top, "", "training steps an hour")

    def place(count: int, steps: float) -> tuple[float, float]:
        x = LEFT + 40 + (RIGHT - LEFT - 80) * (count - 1) / (most - 1)
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * steps / top, 1)

    for count in range(1, most + 1):
        svg.text(place(count, 0)[0], BOTTOM + 20, [str(count)], small=True)
    svg.text((LEFT + RIGHT) / 2, BOTTOM + 40, ["engines"], small=True)
    for letter, kind, bound in (("a", "--async, bound 4", True), ("b", "synchronous", False)):
        of = [row for row in rows if bool(row["bound"]) == bound]
        line = [place(row["engines"], row["said"]["steps_an_hour"]) for row in of]
        svg.line(line, f"curve {letter}")
        for row in of:
            svg.dot(*place(row["engines"], row["steps_an_hour"]), 5, letter)
        svg.text(RIGHT + 14, line[-1][1] + 4, [kind], kind=letter, anchor="start")
    svg.text(RIGHT + 14, BOTTOM - 24, ["lines: simulated", "dots: measured"], small=True, anchor="start")
    return svg.end()
