"""The suite `perceive`: charts and tables drawn as text, and questions about the values that they show."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from nano_rl.tasks.suite import Made, TaskSuite
from nano_suites.family import FEW, SHORTEST, THINGS, WORDS, Family, act, answered, view

TOOLS = ("read_file", "calculate", "submit")
Values = dict[str, int]
"""name -> what the chart shows of it"""


def _bars(values: Values, rng: random.Random) -> tuple[str, Values]:
    """Horizontal bars; the legend says what one mark stands for."""
    unit, mark, width = rng.choice((1, 2, 5, 10)), rng.choice("#*="), max(map(len, values))
    lines = [f"{name:>{width}} | {mark * value}" for name, value in values.items()]
    scaled = {name: value * unit for name, value in values.items()}
    return "\n".join([f"one {mark} is {unit}", "", *lines]) + "\n", scaled


def _columns(values: Values, rng: random.Random) -> tuple[str, Values]:
    """Upright columns over letters that a key below explains; the axis is at the left."""
    unit, top = rng.choice((1, 2, 5)), max(values.values())
    lines = [
        f"{row * unit:>4} | " + "  ".join("#" if value >= row else " " for value in values.values())
        for row in range(top, 0, -1)
    ]
    keys = "ABCDEFGHIJKLMNOP"[: len(values)]
    lines += ["   0 +-" + "-" * (3 * len(values)), "       " + "  ".join(keys), ""]
    lines += [f"{key} = {name}" for key, name in zip(keys, values, strict=True)]
    return "\n".join(line.rstrip() for line in lines) + "\n", {n: v * unit for n, v in values.items()}


def _points(values: Values, rng: random.Random) -> tuple[str, Values]:
    """One point a row: its distance from the axis is the value, counted by the scale above."""
    top, width = 10 * (max(values.values()) // 10 + 1), max(map(len, values))
    scale = "".join("|" if x % 10 == 0 else "+" if x % 5 == 0 else "." for x in range(top + 1))
    marks = " " * (width + 1) + "".join(f"{x:<10}" for x in range(0, top + 1, 10)).rstrip()
    lines = [f"{name:>{width}} " + " " * value + "o" for name, value in values.items()]
    return "\n".join([marks, " " * (width + 1) + scale, *lines]) + "\n", dict(values)


def _table(values: Values, rng: random.Random) -> tuple[str, Values]:
    """A table with three columns of numbers, the asked one under the head `units`."""
    heads = rng.sample(["units", "boxes", "orders"], 3)
    lines = [f"| {'name':<10} | " + " | ".join(f"{head:>6}" for head in heads) + " |"]
    lines.append("|" + "-" * 12 + "|" + "|".join("-" * 8 for _ in heads) + "|")
    for name, value in values.items():
        cells = [value if head == "units" else rng.randint(1, 30) for head in heads]
        lines.append(f"| {name:<10} | " + " | ".join(f"{cell:>6}" for cell in cells) + " |")
    return "\n".join(lines) + "\n", dict(values)


def _timeline(values: Values, rng: random.Random) -> tuple[str, Values]:
    """Spans of days; the value is the number of days of a span."""
    width = max(map(len, values))
    lines = [f"{name:>{width}} |" + "." * rng.randint(0, 9) + "=" * value for name, value in values.items()]
    days = max(map(len, lines)) - width - 2
    ruler = " " * (width + 2) + "".join(str(day % 10) for day in range(1, days + 1))
    return "\n".join(["one = is a day", ruler, *lines]) + "\n", dict(values)


def _areas(values: Values, rng: random.Random) -> tuple[str, Values]:
    """A map of cells, each with the letter of its owner; the value is the number of cells."""
    keys = dict(zip(values, "ABCDEFGHIJKLMNOP", strict=False))
    cells = [keys[name] for name, value in values.items() for _ in range(value)]
    rng.shuffle(cells)
    rows = ["".join(cells[at : at + 20]) for at in range(0, len(cells), 20)]
    return "\n".join([*rows, "", *(f"{key} = {name}" for name, key in keys.items())]) + "\n", dict(values)


CHARTS: dict[str, tuple[str, Callable[[Values, random.Random], tuple[str, Values]]]] = {
    "bars": ("the value of", _bars), "columns": ("the value of", _columns),
    "points": ("the value of", _points), "table": ("the number of units of", _table),
    "timeline": ("the number of days of", _timeline), "areas": ("the number of cells of", _areas),
}  # fmt: skip
ROWS = (3, 5, 7, 9)
"""values in the chart of each level"""


def _draw(name: str, level: int, rng: random.Random) -> Made:
    of, chart = CHARTS[name]
    names = rng.sample([word for word in WORDS if len(word) <= 8], ROWS[level])
    text, values = chart(dict(zip(names, rng.sample(range(2, 25), len(names)), strict=True)), rng)
    path = f"{rng.choice(WORDS)}.txt"
    question, answer, sum_of = QUESTIONS[level](of, values, rng)
    sums = [act("calculate", expression=sum_of)] if sum_of else []
    return answered(
        f"{path} holds a chart. {question}", {path: text}, answer, act("read_file", path=path), *sums
    )


def _draw_bar(thing: str, rng: random.Random) -> Made:
    """One bar, whose length is the answer."""
    length, path = rng.randint(2, 24), f"{rng.choice(FEW)}.txt"
    bar = f"{thing} | {rng.choice('#*=') * length}\n"
    return answered(f"How long is the {thing}?", {path: bar}, length, act("read_file", path=path))


def _one(of: str, values: Values, rng: random.Random) -> tuple[str, str | int, str]:
    name = rng.choice(list(values))
    return f"What is {of} {name}?", values[name], ""


def _extreme(of: str, values: Values, rng: random.Random) -> tuple[str, str | int, str]:
    largest = rng.random() < 0.5
    name = (max if largest else min)(values, key=lambda name: values[name])
    return f"Which name has the {'largest' if largest else 'smallest'} value?", name, ""


def _difference(of: str, values: Values, rng: random.Random) -> tuple[str, str | int, str]:
    one, other = sorted(rng.sample(list(values), 2), key=lambda name: -values[name])
    expression = f"{values[one]} - {values[other]}"
    return f"By how much is {of} {one} above that of {other}?", values[one] - values[other], expression


def _above(of: str, values: Values, rng: random.Random) -> tuple[str, str | int, str]:
    """The sum of the values above one of them, which is named and not given."""
    bound = rng.choice(sorted(values, key=lambda name: values[name])[:-2])
    above = [value for value in values.values() if value > values[bound]]
    return f"What is the sum of all values above that of {bound}?", sum(above), " + ".join(map(str, above))


QUESTIONS = (_one, _extreme, _difference, _above)

SUITE = TaskSuite(
    name="perceive",
    version="1",
    about="charts and tables drawn as text, and what they show",
    views=(
        *(
            view("perceive", of, level, TOOLS, [Family(name, partial(_draw, name, level)) for name in CHARTS])
            for level, of in enumerate(("value", "extreme", "difference", "sum_above"))
        ),
        view("perceive", "bar", 0, TOOLS, [
            Family(thing, partial(_draw_bar, thing)) for thing in THINGS
        ], SHORTEST, extra=True),
    ),
)  # fmt: skip
