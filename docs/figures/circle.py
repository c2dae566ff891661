"""The picture of the circle: what each half reads and what it writes."""

from __future__ import annotations

from svg import Svg

WIDTH, HEIGHT = 840, 340
TITLE = (
    "nano-coder turns a task, a folder and a model into logged runs; nano-rl turns logged runs and tasks "
    "into a checkpoint, which nano-coder runs next"
)


def circle() -> str:
    svg = Svg(WIDTH, HEIGHT, TITLE)
    svg.box(165, 125, 190, 90, "nano-coder", ["runs a model on a task", "inside a sandbox"])
    svg.box(485, 125, 190, 90, "nano-rl", ["trains the model", "on groups of runs"])
    svg.arrow("M 260 125 C 300 60, 540 60, 580 125")
    svg.text(420, 24, ["the log (SQLite)"], bold=True)
    logged = ["trajectories: sampled tokens, log-probs, tool results;", "diffs; verdicts"]
    svg.text(420, 42, logged, small=True)
    svg.arrow("M 580 215 C 540 280, 300 280, 260 215")
    svg.text(420, 290, ["a checkpoint"], bold=True)
    learned = [
        "weights or an adapter for transformers, PEFT and vLLM,",
        "with the list of runs that it learned from",
    ]
    svg.text(420, 308, learned, small=True)
    svg.arrow("M 112 170 L 162 170")
    svg.text(56, 156, ["a task", "a folder", "a model"])
    svg.arrow("M 728 170 L 678 170")
    svg.text(784, 147, ["tasks:", "made,", "imported,", "or runs"])
    return svg.end()
