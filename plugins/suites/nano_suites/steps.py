"""The suite `plan`: two to eight steps that need each other's results, listed in no order."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_shared.types import Limits, OracleAction
from nano_suites.family import FEW, SHORTEST, THINGS, WORDS, Family, act, answered, left, view

TOOLS = ("plan", "read_file", "write_file", "calculate", "submit")
LIMITS = Limits(max_turns=36, max_tokens=6144)
SIZES = (2, 4, 6, 8)
"""steps of each level"""

StepRule = tuple[str, Callable[[str, str], str]]
"""a sentence about `{a}` and `{b}`, and what it makes of their contents"""

NUMBERS: tuple[StepRule, ...] = (
    ("the sum of {a} and {b}", lambda a, b: str(int(a) + int(b))),
    ("the larger of {a} and {b}, plus 7", lambda a, b: str(max(int(a), int(b)) + 7)),
    ("twice {a}, minus {b}", lambda a, b: str(2 * int(a) - int(b))),
    ("the difference between {a} and {b}, never negative", lambda a, b: str(abs(int(a) - int(b)))),
)
TEXTS: tuple[StepRule, ...] = (
    ("the text of {a} followed by that of {b}", lambda a, b: a + b),
    ("the first three letters of {a}, then the text of {b}", lambda a, b: a[:3] + b),
    ("the text of {a}, a hyphen, and the last letter of {b}", lambda a, b: f"{a}-{b[-1]}"),
    ("the shorter of the texts of {a} and {b}; {a} if they are of one length",
     lambda a, b: b if len(b) < len(a) else a),
)  # fmt: skip
LISTS: tuple[StepRule, ...] = (
    ("the words of {a}, then those of {b}", lambda a, b: f"{a} {b}"),
    ("the words of {a} and {b} in alphabetical order", lambda a, b: " ".join(sorted(f"{a} {b}".split()))),
    ("the first word of {a} and the last of {b}", lambda a, b: f"{a.split()[0]} {b.split()[-1]}"),
    ("the last word of {a}, then the words of {b}", lambda a, b: f"{a.split()[-1]} {b}"),
)
RULES: dict[str, tuple[tuple[StepRule, ...], Callable[[random.Random], str]]] = {
    "numbers": (NUMBERS, lambda rng: str(rng.randint(2, 99))),
    "texts": (TEXTS, lambda rng: rng.choice(WORDS)),
    "lists": (LISTS, lambda rng: " ".join(rng.sample(WORDS, 2))),
}
ORDERS = ("chain", "tree")
"""each step needs the one before it, or any two of those before it"""


def _draw(rules: str, order: str, level: int, rng: random.Random) -> Made:
    known, source = RULES[rules]
    names = rng.sample([word for word in WORDS if len(word) < 7], SIZES[level] + 2)
    given, steps = names[:2], names[2:]
    contents = {f"data/{name}.txt": source(rng) for name in given}
    files = {path: text + "\n" for path, text in contents.items()}
    said, writes = {}, []
    for name in steps:
        one, other = _needs(order, list(contents), rng)
        sentence, rule = rng.choice(known)
        path = f"out/{name}.txt"
        contents[path] = rule(contents[one], contents[other])
        said[path] = f"- {path} holds {sentence.format(a=one, b=other)}."
        writes.append(act("write_file", path=path, content=contents[path] + "\n"))
    files["steps.md"] = "\n".join(rng.sample(list(said.values()), len(said))) + "\n"
    checks = [StateCheck(kind="text", path=path, expected=contents[path]) for path in said]
    checks += [StateCheck(kind="text", path=path, expected=text) for path, text in files.items()]
    prompt = "Make all the files that steps.md describes, one line each. Some need others to be there first."
    looks = [act("read_file", path=path) for path in files]
    return left(prompt, files, checks, *looks[-1:], _plan(said, "pending"), *looks[:-1], *writes,
                _plan(said, "completed"))  # fmt: skip


def _draw_order(thing: str, rng: random.Random) -> Made:
    """Six steps, known by which comes straight before which; the fourth is asked for."""
    steps = rng.sample(FEW, 6)
    pairs = [f"{before}>{after}" for before, after in pairwise(steps)]
    rng.shuffle(pairs)
    said = "\n".join([f"The {thing}: which step is fourth?", *pairs, f"{steps[0]} is first."])
    return answered(said, {}, steps[3], act("plan", steps=[{"step": step} for step in steps[:4]]))


def _needs(order: str, paths: list[str], rng: random.Random) -> tuple[str, str]:
    """Two files that are there; one is the newest, so that every step of a chain is needed."""
    if order == "chain" or len(paths) < 3:
        return paths[-1], rng.choice(paths[:-1])
    one, other = rng.sample(paths, 2)
    return one, other


def _plan(paths: dict[str, str], status: str) -> OracleAction:
    return act("plan", steps=[{"step": f"write {path}", "status": status} for path in paths])


SUITE = TaskSuite(
    name="plan",
    version="1",
    about="two to eight steps that need each other's results",
    views=(
        *(
            view("plan", f"steps_{size}", level, TOOLS, [
                Family(f"{rules}+{order}", partial(_draw, rules, order, level))
                for rules in RULES for order in ORDERS
            ], LIMITS)
            for level, size in enumerate(SIZES)
        ),
        view("plan", "order", 0, ("plan", "submit"), [
            Family(thing, partial(_draw_order, thing)) for thing in THINGS
        ], SHORTEST, extra=True),
    ),
)  # fmt: skip
