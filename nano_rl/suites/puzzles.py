"""Puzzles of the domain `logic`: everything needed is in the prompt, and exactly one answer fits."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise, permutations, product

from nano_rl.suites.family import Drawn, act, answered
from nano_rl.suites.words import COLORS, NAMES

Posed = tuple[str, str | int, str | None]
"""prompt, answer, an expression to calculate"""


def puzzle(of: Callable[[random.Random], Posed], rng: random.Random) -> Drawn:
    prompt, answer, expression = of(rng)
    actions = [act("calculate", expression=expression)] if expression else []
    return answered(prompt, {}, answer, *actions)


def _order(rng: random.Random) -> tuple[list[str], list[str]]:
    """People from oldest to youngest, and clues that leave no other order."""
    names = rng.sample(NAMES, rng.randint(4, 5))
    clues = [f"{one} is older than {other}." for one, other in pairwise(names)]
    rng.shuffle(clues)
    return names, clues


def _nth_oldest(rng: random.Random) -> Posed:
    names, clues = _order(rng)
    place = rng.randrange(1, len(names) - 1)
    ordinal = ("oldest", "second oldest", "third oldest", "fourth oldest")[place]
    return f"{' '.join(clues)} Who is the {ordinal}?", names[place], None


def _youngest(rng: random.Random) -> Posed:
    names, clues = _order(rng)
    return f"{' '.join(clues)} Who is the youngest?", names[-1], None


def _between(rng: random.Random) -> Posed:
    names, clues = _order(rng)
    at = rng.randrange(1, len(names) - 1)
    return f"{' '.join(clues)} Who is between {names[at + 1]} and {names[at - 1]} in age?", names[at], None


def _houses(rng: random.Random) -> Posed:
    """Who lives in which house: clues are added until one arrangement is left."""
    names, colors = rng.sample(NAMES, 3), rng.sample(COLORS, 3)
    truth = dict(zip(names, rng.sample(colors, 3), strict=True))
    arrangements = [dict(zip(names, order, strict=True)) for order in permutations(colors)]
    clues = []
    for name, color in rng.sample(list(product(names, colors)), 9):
        if len(arrangements) == 1:
            break
        fitting = [a for a in arrangements if (a[name] == color) == (truth[name] == color)]
        if truth[name] != color and len(fitting) < len(arrangements):
            clues.append(f"{name} does not live in the {color} house.")
            arrangements = fitting
    asked = rng.choice(names)
    who = f"{', '.join(names[:-1])} and {names[-1]}"
    start = f"{who} live in the {', '.join(sorted(colors))} houses, one in each."
    return f"{start} {' '.join(clues)} What is the colour of the house of {asked}?", truth[asked], None


def _liars(rng: random.Random) -> Posed:
    """Each of three tells the truth or lies; drawn until one reading fits and somebody lies alone."""
    while True:
        names = rng.sample(NAMES, 3)
        said = [
            (rng.choice([other for other in names if other != name]), rng.random() < 0.5) for name in names
        ]
        fitting = []
        for honest in product((True, False), repeat=3):
            is_honest = dict(zip(names, honest, strict=True))
            if all(
                (is_honest[of] == claim) == is_honest[name]
                for name, (of, claim) in zip(names, said, strict=True)
            ):
                fitting.append(is_honest)
        fitting = [reading for reading in fitting if sum(reading.values()) == 2]
        if len(fitting) == 1:
            break
    lines = [
        f'{name} says: "{of} {"tells the truth" if claim else "lies"}."'
        for name, (of, claim) in zip(names, said, strict=True)
    ]
    liar = next(name for name, honest in fitting[0].items() if not honest)
    start = "Two of three always tell the truth, and one always lies."
    return f"{start} {' '.join(lines)} Who lies?", liar, None


def _truth(rng: random.Random) -> Posed:
    values = {letter: rng.random() < 0.5 for letter in "ABC"}
    parts = [rng.choice(("", "not ")) + letter for letter in rng.sample("ABC", 3)]
    formula = f"({parts[0]} {rng.choice(('and', 'or'))} {parts[1]}) {rng.choice(('and', 'or'))} {parts[2]}"
    answer = "true" if eval(formula, dict(values)) else "false"  # our own text, from the line above
    given = ", ".join(f"{letter} is {str(value).lower()}" for letter, value in values.items())
    return f"{given}. Is this true or false: {formula}? Submit true or false.", answer, None


def _next(rng: random.Random) -> Posed:
    start, step, change = rng.randint(1, 30), rng.randint(2, 12), rng.randint(1, 5)
    numbers = [start]
    for i in range(5):
        numbers.append(numbers[-1] + step + i * change)
    shown = ", ".join(map(str, numbers[:-1]))
    return f"Which number comes next: {shown}?", numbers[-1], f"{numbers[-2]} + {step} + 4 * {change}"


def _doubling(rng: random.Random) -> Posed:
    start, factor, plus = rng.randint(1, 9), rng.randint(2, 3), rng.randint(0, 5)
    numbers = [start]
    for _ in range(5):
        numbers.append(numbers[-1] * factor + plus)
    return (
        f"Which number comes next: {', '.join(map(str, numbers[:-1]))}?",
        numbers[-1],
        f"{numbers[-2]} * {factor} + {plus}",
    )


def _balance(rng: random.Random) -> Posed:
    one, two, three = (rng.randint(2, 20) for _ in range(3))
    a, b, c = rng.sample(NAMES, 3)
    prompt = (
        f"{a} has {one * 10}. {a} gives {two} to {b}, who had {three} and now gives half of everything, "
        f"rounded down, to {c}, who had nothing. How much has {c}?"
    )
    return prompt, (two + three) // 2, f"({two} + {three}) // 2"


def _meeting(rng: random.Random) -> Posed:
    start, minutes = rng.randint(8, 15) * 60 + rng.choice((0, 15, 30)), rng.choice((35, 50, 75, 95, 140, 170))
    end = start + minutes
    clock = f"{start // 60:02d}:{start % 60:02d}"
    begins = f"A meeting begins at {clock} and takes {minutes} minutes."
    return (
        f"{begins} When does it end? Submit HH:MM.",
        f"{end // 60:02d}:{end % 60:02d}",
        f"{start} + {minutes}",
    )


PUZZLES: dict[str, Callable[[random.Random], Posed]] = {
    "nth_oldest": _nth_oldest, "youngest": _youngest, "between": _between, "houses": _houses, "liars": _liars,
    "truth": _truth, "next": _next, "doubling": _doubling, "balance": _balance, "meeting": _meeting,
}  # fmt: skip
