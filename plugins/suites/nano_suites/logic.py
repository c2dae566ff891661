"""The suite `logic`: questions about a small knowledge base, answered by submit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.types import OracleAction
from nano_suites.family import CITIES, COLORS, TEAMS, WORDS, Family, act, answered, people, view

_FACTS = TypeAdapter(dict[str, dict[str, str | int]])


@tool()
def lookup(context: ToolContext, subject: str) -> ToolResult:
    """Show what is known about a subject: a person, a place, a thing."""
    try:
        facts = _FACTS.validate_json(context.jail.read("facts.json"), strict=True)
    except FileNotFoundError:
        raise ToolFailure("no such file: 'facts.json'") from None
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ToolFailure(f"facts.json is damaged: {where}: {first['msg'].lower()}") from None
    found = next((name for name in facts if name.casefold() == subject.strip().casefold()), None)
    if found is None:
        raise ToolFailure(f"nothing is known about {subject!r}")
    return ToolResult(text="\n".join(f"{key}: {value}" for key, value in facts[found].items()))


TOOLS = ("lookup", "calculate", "submit")
Facts = dict[str, dict[str, Any]]
WordProblem = tuple[str, str | int, list[OracleAction]]
"""question, answer, actions that find it"""


class World:
    """A knowledge base of people, cities and goods that refer to each other."""

    def __init__(self, rng: random.Random) -> None:
        self.people = people(rng, 6)
        self.cities = rng.sample(CITIES, 4)
        self.goods = rng.sample(WORDS, 5)
        ages, pays = rng.sample(range(21, 65), 6), rng.sample(range(1800, 5200, 10), 6)
        self.facts: Facts = {}
        for name, age, pay in zip(self.people, ages, pays, strict=True):
            self.facts[name] = {
                "age": age, "city": rng.choice(self.cities), "team": rng.choice(TEAMS), "pay": pay,
                "manager": rng.choice([other for other in self.people if other != name]),
                "favourite": rng.choice(self.goods),
            }  # fmt: skip
        sizes, years = rng.sample(range(20, 900), 4), rng.sample(range(900, 1800), 4)
        for city, size, year in zip(self.cities, sizes, years, strict=True):
            self.facts[city] = {
                "thousands of people": size,
                "founded": year,
                "mayor": rng.choice(self.people),
            }
        for thing, price in zip(self.goods, rng.sample(range(2, 99), 5), strict=True):
            colour, origin = rng.choice(COLORS), rng.choice(self.cities)
            self.facts[thing] = {"price": price, "colour": colour, "origin": origin}

    @property
    def files(self) -> dict[str, str]:
        return {"facts.json": json.dumps(self.facts, indent=1) + "\n"}


def _look(*subjects: str) -> list[OracleAction]:
    return [act("lookup", subject=subject) for subject in subjects]


def _ask(of: Callable[[random.Random, World], WordProblem], rng: random.Random) -> Made:
    world = World(rng)
    question, answer, actions = of(rng, world)
    return answered(question, world.files, answer, *actions)


# ------------------------------------------------------------------------------------ level 0: one fact

ONE = {
    "age": ("people", "How old is {}?", "age"), "city": ("people", "In which city does {} live?", "city"),
    "team": ("people", "In which team is {}?", "team"), "pay": ("people", "What is the pay of {}?", "pay"),
    "manager": ("people", "Who is the manager of {}?", "manager"),
    "favourite": ("people", "What is the favourite thing of {}?", "favourite"),
    "size": ("cities", "How many thousand people live in {}?", "thousands of people"),
    "founded": ("cities", "When was {} founded?", "founded"), "mayor": ("cities", "Who is the mayor of {}?", "mayor"),
    "price": ("goods", "What is the price of the {}?", "price"),
    "colour": ("goods", "What is the colour of the {}?", "colour"),
    "origin": ("goods", "Where does the {} come from?", "origin"),
}  # fmt: skip


def _one(name: str, rng: random.Random, world: World) -> WordProblem:
    group, question, key = ONE[name]
    subject = rng.choice(getattr(world, group))
    return question.format(subject), world.facts[subject][key], _look(subject)


# --------------------------------------------------------------- levels 1 and 3: facts of facts, in a chain

HOPS = {
    # of a person: phrase of the thing it leads to
    "manager": "the manager of {}", "city": "the city of {}", "favourite": "the favourite thing of {}",
    "mayor": "the mayor of {}", "origin": "the origin of {}",
}  # fmt: skip
KINDS = {"manager": "person", "city": "city", "favourite": "thing", "mayor": "person", "origin": "city"}
OPEN = {"person": ("manager", "city", "favourite"), "city": ("mayor",), "thing": ("origin",)}
ENDS = {
    "person": ("age", "pay", "team"), "city": ("thousands of people", "founded"), "thing": ("price", "colour"),
}  # fmt: skip
PHRASES = {"thousands of people": "the number of thousands of people", "founded": "the year of foundation"}


def _chains(length: int) -> list[tuple[str, ...]]:
    """Every way of `length` hops from a person to a fact of the last."""
    ways: list[tuple[tuple[str, ...], str]] = [((), "person")]
    for _ in range(length):
        ways = [((*way, hop), KINDS[hop]) for way, kind in ways for hop in OPEN[kind]]
    return [(*way, end) for way, kind in ways for end in ENDS[kind]]


def _chain(way: tuple[str, ...], rng: random.Random, world: World) -> WordProblem:
    *hops, end = way
    subject = rng.choice(world.people)
    said, actions = subject, _look(subject)
    for hop in hops:
        said, subject = HOPS[hop].format(said), world.facts[subject][hop]
        actions += _look(subject)
    phrase = PHRASES.get(end, f"the {end}")
    return f"What is {phrase} of {said}?", world.facts[subject][end], actions


# ------------------------------------------------------------------------------- level 2: facts and sums


def _sum(group: str, key: str, said: str, n: int, rng: random.Random, world: World) -> WordProblem:
    chosen = rng.sample(getattr(world, group), n)
    values = [world.facts[subject][key] for subject in chosen]
    named = f"{', '.join(chosen[:-1])} and {chosen[-1]}"
    action = act("calculate", expression=" + ".join(map(str, values)))
    return f"{said.format(named)} together?", sum(values), [*_look(*chosen), action]


def _extreme(
    group: str, key: str, said: str, best: Callable[..., str], rng: random.Random, world: World
) -> WordProblem:
    chosen = rng.sample(getattr(world, group), 3)
    answer = best(chosen, key=lambda subject: world.facts[subject][key])
    return f"{said}, {', '.join(chosen[:-1])} or {chosen[-1]}?", answer, _look(*chosen)


def _difference(group: str, key: str, said: str, rng: random.Random, world: World) -> WordProblem:
    chosen = rng.sample(getattr(world, group), 2)
    more, less = sorted((world.facts[subject][key] for subject in chosen), reverse=True)
    action = act("calculate", expression=f"{more} - {less}")
    return said.format(*chosen), more - less, [*_look(*chosen), action]


def _basket(rng: random.Random, world: World) -> WordProblem:
    chosen = rng.sample(world.goods, 2)
    amounts = [rng.randint(2, 12) for _ in chosen]
    parts = [f"{n} * {world.facts[thing]['price']}" for n, thing in zip(amounts, chosen, strict=True)]
    total = sum(n * world.facts[thing]["price"] for n, thing in zip(amounts, chosen, strict=True))
    said = " and ".join(f"{n} times the {thing}" for n, thing in zip(amounts, chosen, strict=True))
    action = act("calculate", expression=" + ".join(parts))
    return f"What do {said} cost together?", total, [*_look(*chosen), action]


def _change(rng: random.Random, world: World) -> WordProblem:
    thing, n = rng.choice(world.goods), rng.randint(2, 9)
    price = world.facts[thing]["price"]
    paid = n * price + rng.randint(1, 300)
    action = act("calculate", expression=f"{paid} - {n} * {price}")
    question = f"I buy the {thing} {n} times and pay with {paid}. What do I get back?"
    return question, paid - n * price, [*_look(thing), action]


def _afford(rng: random.Random, world: World) -> WordProblem:
    who, thing = rng.choice(world.people), rng.choice(world.goods)
    pay, price = world.facts[who]["pay"], world.facts[thing]["price"]
    action = act("calculate", expression=f"{pay} // {price}")
    question = f"How many times can {who} buy the {thing} from one pay? Submit a whole number."
    return question, pay // price, [*_look(who, thing), action]


SUMS: dict[str, Callable[[random.Random, World], WordProblem]] = {
    "sum_ages": partial(_sum, "people", "age", "How old are {}", 3),
    "sum_pays": partial(_sum, "people", "pay", "How much are {} paid", 2),
    "sum_prices": partial(_sum, "goods", "price", "What do {} cost", 3),
    "sum_sizes": partial(_sum, "cities", "thousands of people", "How many thousand people live in {}", 2),
    "oldest": partial(_extreme, "people", "age", "Who is the oldest", max),
    "youngest": partial(_extreme, "people", "age", "Who is the youngest", min),
    "dearest": partial(_extreme, "goods", "price", "What is the most expensive", max),
    "cheapest": partial(_extreme, "goods", "price", "What is the cheapest", min),
    "largest": partial(_extreme, "cities", "thousands of people", "Which city is the largest", max),
    "first_founded": partial(_extreme, "cities", "founded", "Which city was founded first", min),
    "age_gap": partial(_difference, "people", "age", "How many years lie between the ages of {} and {}?"),
    "pay_gap": partial(_difference, "people", "pay", "By how much do the pays of {} and {} differ?"),
    "year_gap": partial(_difference, "cities", "founded", "How many years lie between the foundations of {} and {}?"),
    "basket": _basket, "change": _change, "afford": _afford,
}  # fmt: skip

SUITE = TaskSuite(
    name="logic",
    version="1",
    about="facts looked up, sums calculated",
    views=(
        view("logic", "fact", 0, TOOLS, (Family(name, partial(_ask, partial(_one, name))) for name in ONE)),
        view("logic", "hop", 1, TOOLS, (
            Family("-".join(way), partial(_ask, partial(_chain, way))) for way in _chains(1)
        )),
        view("logic", "sum", 2, TOOLS, (Family(name, partial(_ask, of)) for name, of in SUMS.items())),
        view("logic", "chain", 3, TOOLS, (
            Family("-".join(way), partial(_ask, partial(_chain, way))) for n in (2, 3) for way in _chains(n)
        )),
    ),
)  # fmt: skip
