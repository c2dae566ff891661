"""The suite `memory`: tasks of one project, the last of which asks for what an earlier one was told or read.

Each task is a run of its own, with files of its own: what was not remembered in one is not there in the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from nano_rl.tasks.suite import Made, TaskSuite
from nano_suites.family import (
    CITIES,
    FEW,
    SHORTEST,
    THINGS,
    WORDS,
    Family,
    act,
    answered,
    day,
    person,
    view,
)

TOOLS = ("remember", "recall", "read_file", "calculate", "submit")

KINDS: dict[str, Callable[[random.Random], str]] = {
    "door code": lambda rng: str(rng.randint(1000, 9999)), "owner": person,
    "branch": lambda rng: f"{rng.choice(WORDS)}-{rng.randint(2, 99)}", "deadline": day,
    "office": lambda rng: f"{rng.choice(CITIES)} {rng.randint(10, 99)}",
    "contact": lambda rng: f"{rng.choice(WORDS)}{rng.randint(10, 99)}@example.org",
}  # fmt: skip
_LATER = " Later tasks of this project need it, and will be shown nothing of this one."


def _told(prompt: str, note: str) -> Made:
    """A task that tells something, and asks for no more than an ok."""
    return answered(f"{prompt}{_LATER} Submit ok.", {}, "ok", act("remember", note=note))


def _read(project: str, facts: dict[str, str], rng: random.Random) -> Made:
    """A task that asks for one fact of a file, whose others may be asked for later."""
    text = "".join(f"The {noun} of {project} is {value}.\n" for noun, value in facts.items())
    noun = rng.choice(list(facts))
    prompt = f"What does {project}.md say is the {noun} of {project}? The rest of the file counts, too."
    steps = act("read_file", path=f"{project}.md"), act("remember", note=text.strip())
    return answered(prompt + _LATER, {f"{project}.md": text}, facts[noun], *steps)


def _asked(project: str, noun: str, value: str, *earlier: Made) -> Made:
    prompt = f"What is the {noun} of {project}? An earlier task said it."
    return answered(prompt, {}, value, act("recall", query=f"{noun} {project}"), earlier=earlier)


def _draw_told(noun: str, rng: random.Random) -> Made:
    project, value = rng.choice(WORDS), KINDS[noun](rng)
    fact = f"The {noun} of {project} is {value}."
    return _asked(project, noun, value, _told(fact, fact))


def _draw_read(noun: str, rng: random.Random) -> Made:
    """One file of four facts."""
    project, facts = rng.choice(WORDS), _facts(noun, rng)
    return _asked(project, noun, facts[noun], _read(project, facts, rng))


def _draw_sum(noun: str, rng: random.Random) -> Made:
    """Two tasks tell a number each, of which the last asks for the sum."""
    one, other = rng.sample(WORDS, 2)
    counts = {one: rng.randint(11, 99), other: rng.randint(11, 99)}
    facts = {name: f"{name.capitalize()} has {count} {noun}s." for name, count in counts.items()}
    steps = [act("recall", query=f"{name} {noun}s") for name in counts]
    sums = act("calculate", expression=" + ".join(map(str, counts.values())))
    prompt = f"How many {noun}s have {one} and {other} together? Earlier tasks said it."
    told = tuple(_told(fact, fact) for fact in facts.values())
    return answered(prompt, {}, sum(counts.values()), *steps, sums, earlier=told)


def _draw_changed(noun: str, rng: random.Random) -> Made:
    """A file of facts, a change of one of them, and a file about something else."""
    (project, other), facts = rng.sample(WORDS, 2), _facts(noun, rng)
    new = KINDS[noun](rng)
    while new == facts[noun]:
        new = KINDS[noun](rng)
    change = f"The {noun} of {project} has changed: it is {new} now."
    before = _read(project, facts, rng), _told(change, change), _read(other, _facts(noun, rng), rng)
    return _asked(project, noun, new, *before)


def _facts(noun: str, rng: random.Random) -> dict[str, str]:
    """Values of four kinds, that of `noun` among them, in any order."""
    nouns = [noun, *rng.sample([other for other in KINDS if other != noun], 3)]
    rng.shuffle(nouns)
    return {one: KINDS[one](rng) for one in nouns}


def _draw_one_fact(thing: str, rng: random.Random) -> Made:
    name = rng.choice(FEW)
    fact = f"The {thing} is called {name}."
    told = answered(f"{fact} Submit ok.", {}, "ok", act("remember", note=fact))
    asked = f"What is the {thing} called?"
    return answered(asked, {}, name, act("recall", query=thing), earlier=(told,))


_DRAWN = (("told", _draw_told), ("read", _draw_read), ("sum", _draw_sum), ("changed", _draw_changed))

SUITE = TaskSuite(
    name="memory",
    version="1",
    about="tasks of one project, the last of which needs what earlier ones were told",
    views=(
        *(
            view("memory", name, level, TOOLS, [
                Family(noun, partial(draw, noun)) for noun in (THINGS if name == "sum" else KINDS)
            ])
            for level, (name, draw) in enumerate(_DRAWN)
        ),
        view("memory", "one_fact", 0, ("remember", "recall", "submit"), [
            Family(thing, partial(_draw_one_fact, thing)) for thing in THINGS
        ], SHORTEST, extra=True),
    ),
)  # fmt: skip
