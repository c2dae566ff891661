"""The suite `search`: a library of documents, and questions whose answers lie in two or three of them.

A question names one thing and asks for another, and the name in between stands in neither: it has to be read
in the first document before the second can be found. Every other chain of the library has the same shape.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.types import OracleAction
from nano_suites.family import (
    CITIES,
    COLORS,
    FEW,
    SHORTEST,
    THINGS,
    WORDS,
    Family,
    act,
    answered,
    person,
    view,
)

TOOLS = ("search", "read_file", "submit")

KINDS: dict[str, Callable[[random.Random], str]] = {
    "person": person,
    "company": lambda rng: f"{rng.choice(WORDS).capitalize()} {rng.choice(('Works', 'Brothers', 'Limited'))}",
    "city": lambda rng: rng.choice(CITIES),
    "product": lambda rng: (
        f"{rng.choice(WORDS)} {rng.choice(('lamp', 'clock', 'pump'))} {rng.randint(2, 99)}"
    ),
    "book": lambda rng: f"{rng.choice(COLORS).capitalize()} {rng.choice(WORDS).capitalize()}",
    "ship": lambda rng: f"{rng.choice(WORDS).capitalize()} {rng.choice(('Star', 'Queen', 'Spirit'))}",
    "number": lambda rng: str(rng.randint(1000, 9999)),
    "word": lambda rng: rng.choice(WORDS).capitalize(),
}
FILLERS = (
    "The {} archive was moved last year.", "A report on the {} programme is due soon.",
    "Visitors mention the {} garden first.", "The {} prize was given for the last time.",
    "There is a photograph of a {} gate.", "A {} map hangs on the wall.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FactChain:
    """Kinds of four things, sentences that join each to the next, questions of two and of three hops."""

    kinds: tuple[str, str, str, str]
    facts: tuple[str, str, str]
    questions: tuple[str, str]


CHAINS = {
    "employee": FactChain(
        ("person", "company", "city", "word"),
        ("{} works for {}.", "The head office of {} is in {}.", "The river that runs through {} is the {}."),
        ("In which city is the head office of the company that {} works for?",
         "Which river runs through the city with the head office of the company that {} works for?"),
    ),
    "product": FactChain(
        ("product", "company", "person", "city"),
        ("The {} is made by {}.", "{} was founded by {}.", "{} was born in {}."),
        ("Who founded the company that makes the {}?",
         "In which city was the founder of the company born that makes the {}?"),
    ),
    "book": FactChain(
        ("book", "person", "city", "word"),
        ('"{}" was written by {}.', "{} lives in {}.", "The largest square of {} is called {}."),
        ('In which city lives the author of "{}"?',
         'What is the largest square called in the city where the author of "{}" lives?'),
    ),
    "ship": FactChain(
        ("ship", "company", "person", "number"),
        ("The ship {} belongs to {}.", "{} is led by {}.", "{} is reached at the number {}."),
        ("Who leads the company that the ship {} belongs to?",
         "At which number is the person reached who leads the company that the ship {} belongs to?"),
    ),
    "teacher": FactChain(
        ("person", "person", "city", "company"),
        ("{} was taught by {}.", "{} had a school in {}.", "The oldest firm of {} is {}."),
        ("In which city did the teacher of {} have a school?",
         "What is the oldest firm of the city where the teacher of {} had a school?"),
    ),
}  # fmt: skip
SIZES = (3, 6, 10, 14)
"""chains in the library of each level"""


def _draw(name: str, level: int, rng: random.Random) -> Made:
    """Level 0 names documents after their subject, higher ones by number; level 3 needs three facts."""
    chain, hops = CHAINS[name], 3 if level == 3 else 2
    used: set[str] = set()
    rows = [[_fresh(kind, rng, used) for kind in chain.kinds[: hops + 1]] for _ in range(SIZES[level])]
    facts = chain.facts[:hops]
    pages = [(row[n], fact.format(row[n], row[n + 1])) for row in rows for n, fact in enumerate(facts)]
    rng.shuffle(pages)
    files, places = {}, {}
    for number, (subject, fact) in enumerate(pages, 1):
        title = subject.replace(" ", "-").lower() if level == 0 else f"{number:02}"
        path = f"library/{title}.md"
        files[path], places[subject] = _page(subject, fact, rng), path
    wanted = rng.choice(rows)
    steps = [step for subject in wanted[:hops] for step in _looks(subject, places[subject], level)]
    question = chain.questions[hops - 2].format(wanted[0])
    prompt = rng.choice(("{} The answer is in library/.", "Search library/. {}", "{} Look in library/."))
    return answered(prompt.format(question), files, wanted[hops], *steps)


def _draw_one_fact(thing: str, rng: random.Random) -> Made:
    """Four short pages by number; there is time for one look."""
    things = [thing, *rng.sample([other for other in THINGS if other != thing], 3)]
    names = dict(zip(things, rng.sample(FEW, 4), strict=True))
    rng.shuffle(things)
    files = {f"library/{n}.md": f"The {one} is called {names[one]}.\n" for n, one in enumerate(things, 1)}
    return answered(f"What is the {thing} called?", files, names[thing], act("search", pattern=thing))


def _draw_fact_or_sum(thing: str, rng: random.Random) -> Made:
    """The library of `one_fact`, and a question for a name in it or for a sum; there is time for one call."""
    made = _draw_one_fact(thing, rng)
    if rng.random() < 0.5:
        return made
    left, right, last = rng.randint(11, 39), rng.randint(3, 9), rng.randint(11, 99)
    expression = f"{left} * {right} + {last}"
    step = act("calculate", expression=expression)
    return answered(f"How much is {expression}?", made.files, str(left * right + last), step)


def _draw_pages(thing: str, rng: random.Random) -> Made:
    """Four pages with a name each, all of which are asked for: a short context holds two of them."""
    names, files = rng.sample(FEW, 4), {}
    for number, name in enumerate(names, 1):
        others = [filler.format(rng.choice(WORDS)) for filler in rng.sample(FILLERS, len(FILLERS))]
        files[f"library/{number}.md"] = "\n".join([f"The {thing} is called {name}.", *others]) + "\n"
    looks = [act("read_file", path=path) for path in files]
    asked = f"What is the {thing} called on each page of library/, in the order of the pages?"
    return answered(asked, files, " ".join(names), *looks)


def _fresh(kind: str, rng: random.Random, used: set[str]) -> str:
    """A thing that the library does not have yet, nor one whose name is part of it."""
    while True:
        name = KINDS[kind](rng)
        if not any(name in other or other in name for other in used):
            used.add(name)
            return name


def _page(subject: str, fact: str, rng: random.Random) -> str:
    others = [filler.format(rng.choice(WORDS)) for filler in rng.sample(FILLERS, rng.randint(1, 3))]
    others.insert(rng.randint(0, len(others)), fact)
    return f"# {subject}\n\n" + "\n".join(others) + "\n"


def _looks(subject: str, path: str, level: int) -> list[OracleAction]:
    """Find the document, and read it; at level 0 its name is known."""
    found = [] if level == 0 else [act("search", pattern=f"^# {subject}$", path="library")]
    return [*found, act("read_file", path=path)]


SUITE = TaskSuite(
    name="search",
    version="1",
    about="questions to a library of documents, two or three of which hold the answer",
    views=(
        *(
            view("search", f"hops_{level}", level, TOOLS, [
                Family(name, partial(_draw, name, level)) for name in CHAINS
            ])
            for level in range(4)
        ),
        view("search", "one_fact", 0, TOOLS, [
            Family(thing, partial(_draw_one_fact, thing)) for thing in THINGS
        ], SHORTEST, extra=True),
        view("search", "fact_or_sum", 0, ("search", "calculate", "submit"), [
            Family(thing, partial(_draw_fact_or_sum, thing)) for thing in THINGS
        ], SHORTEST, extra=True),
        view("search", "pages", 0, ("read_file", "submit"), [
            Family(thing, partial(_draw_pages, thing)) for thing in THINGS
        ], extra=True),
    ),
)  # fmt: skip
