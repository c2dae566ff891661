"""The suite `data`: questions about CSV and JSON files, and transformations of them with Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from nano_rl.tasks.suite import Made, TaskSuite
from nano_suites.data_changes import (
    CLEANINGS,
    TRANSFORMS,
    Person,
    clean,
    draw_people,
    read_source,
    transform,
    written,
)
from nano_suites.family import Family, act, answered, view

READ_TOOLS = ("read_file", "submit")
TOOLS = ("read_file", "python", "write_file", "submit")
FORMATS = ("csv", "json")

# ------------------------------------------------------------------------- level 0: read one small file


def _person(rng: random.Random, people: list[Person]) -> tuple[str, Any]:
    one, field = rng.choice(people), rng.choice(("age", "city", "team", "points"))
    return f"What is the {field} of {one['name']}?", one[field]


def _first(rng: random.Random, people: list[Person]) -> tuple[str, Any]:
    field = rng.choice(("name", "city", "team"))
    return f"What is the {field} in the first record?", people[0][field]


def _last(rng: random.Random, people: list[Person]) -> tuple[str, Any]:
    field = rng.choice(("name", "city", "team"))
    return f"What is the {field} in the last record?", people[-1][field]


def _oldest(rng: random.Random, people: list[Person]) -> tuple[str, Any]:
    return "Who is the oldest? Submit the name.", max(people, key=lambda p: p["age"])["name"]


def _having(rng: random.Random, people: list[Person]) -> tuple[str, Any]:
    points = rng.choice(people)["points"]
    return f"Who has {points} points? Submit the name.", next(
        p["name"] for p in people if p["points"] == points
    )


def _records(rng: random.Random, people: list[Person]) -> tuple[str, Any]:
    return "How many records are there?", len(people)


def _before(rng: random.Random, people: list[Person]) -> tuple[str, Any]:
    at = rng.randrange(1, len(people))
    return f"Whose record stands just before that of {people[at]['name']}?", people[at - 1]["name"]


TableQuestion = Callable[[random.Random, list[Person]], tuple[str, Any]]
READING: dict[str, TableQuestion] = {
    "person": _person, "first": _first, "last": _last, "oldest": _oldest, "having": _having,
    "records": _records, "before": _before,
}  # fmt: skip


def _read(of: TableQuestion, form: str, rng: random.Random) -> Made:
    people = draw_people(rng, rng.randint(3, 7))
    question, answer = of(rng, people)
    path = f"people.{form}"
    return answered(
        f"Look into {path}. {question}", {path: written(people, form)}, answer, act("read_file", path=path)
    )


# ---------------------------------------------------------------- level 1: aggregates of a filtered file

FILTERS: dict[str, Callable[[random.Random, list[Person]], tuple[str, str]]] = {
    # what rows, and the condition on a row r in Python
    "all": lambda rng, people: ("of everybody", "True"),
    "city": lambda rng, people: (lambda c: (f"of those in {c}", f"r['city'] == {c!r}"))(rng.choice(people)["city"]),
    "team": lambda rng, people: (lambda t: (f"of the team {t}", f"r['team'] == {t!r}"))(rng.choice(people)["team"]),
    "older": lambda rng, people: (lambda n: (f"of those older than {n}", f"int(r['age']) > {n}"))(rng.randint(25, 50)),
    "not_team": lambda rng, people: (
        lambda t: (f"of those not in the team {t}", f"r['team'] != {t!r}")
    )(rng.choice(people)["team"]),
}  # fmt: skip
AGGREGATES = {
    # question, and the answer in Python over the rows kept
    "count": ("What is the number {of}?", "len(kept)"),
    "sum": ("What is the sum of the points {of}?", "sum(int(r['points']) for r in kept)"),
    "most": ("What is the highest number of points {of}?", "max(int(r['points']) for r in kept)"),
    "oldest": ("What is the name of the oldest {of}?", "max(kept, key=lambda r: int(r['age']))['name']"),
    "cities": ("How many different cities are named in the records {of}?", "len({r['city'] for r in kept})"),
    "names": ("Which name comes first in alphabetical order {of}?", "min(r['name'] for r in kept)"),
}  # fmt: skip


def _aggregate(filtered: str, aggregate: str, form: str, rng: random.Random) -> Made:
    while True:
        people = draw_people(rng, rng.randint(8, 20))
        said, condition = FILTERS[filtered](rng, people)
        question, value = AGGREGATES[aggregate]
        path = f"people.{form}"
        code = f"{read_source('rows', path)}kept = [r for r in rows if {condition}]\nprint({value})"
        kept = [r for r in people if eval(condition, {"r": r})]  # our own text, from the tables above
        if kept:
            break
    answer = eval(value, {"kept": kept})
    prompt = f"{path} holds records of people. {question.replace('{of}', said)}"
    return answered(
        prompt, {path: written(people, form)}, answer, act("read_file", path=path), act("python", code=code)
    )


SUITE = TaskSuite(
    name="data",
    version="1",
    about="wrangling of CSV and JSON files",
    views=(
        view("data", "read", 0, READ_TOOLS, (
            Family(f"{name}+{form}", partial(_read, of, form)) for name, of in READING.items() for form in FORMATS
        )),
        view("data", "aggregate", 1, TOOLS, (
            Family(f"{a}+{f}+{form}", partial(_aggregate, f, a, form))
            for a in AGGREGATES for f in FILTERS for form in FORMATS
        )),
        view("data", "transform", 2, TOOLS, (
            Family(f"{name}+{source}+{target}", partial(transform, of, source, target))
            for name, of in TRANSFORMS.items() for source in FORMATS for target in FORMATS
        )),
        view("data", "clean", 3, TOOLS, (
            Family(f"{name}+{form}", partial(clean, of, form)) for name, of in CLEANINGS.items() for form in FORMATS
        )),
    ),
)  # fmt: skip
