"""The suite `data`: questions about CSV and JSON files, and transformations of them with Python."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_suites.family import (
    CITIES,
    NAMES,
    TEAMS,
    Draw,
    Family,
    act,
    answered,
    draw_gaps,
    filled,
    left,
    said,
    view,
)

Person = dict[str, Any]
NUMBERS = ("age", "points")


def draw_people(rng: random.Random, n: int) -> list[Person]:
    """`n` people of distinct names, ages and points."""
    cities, teams = rng.sample(CITIES, 3), rng.sample(TEAMS, 3)
    ages, points = rng.sample(range(19, 66), n), rng.sample(range(10, 500), n)
    return [
        {"name": name, "age": age, "city": rng.choice(cities), "team": rng.choice(teams), "points": score}
        for name, age, score in zip(rng.sample(NAMES, n), ages, points, strict=True)
    ]


def written(records: Sequence[dict[str, Any]], form: str) -> str:
    """The records as a file of that form; those of a CSV file need the same keys."""
    if form == "json":
        return "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"
    file = io.StringIO()
    writer = csv.DictWriter(file, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def read_source(name: str, path: str) -> str:
    """Python that reads a file into a list of dicts; what a CSV file holds stays text."""
    if path.endswith(".json"):
        return f"import json\n{name} = json.load(open({path!r}))\n"
    return f"import csv\n{name} = list(csv.DictReader(open({path!r})))\n"


def write_source(name: str, path: str) -> str:
    """Python that writes a list of dicts to a file."""
    if path.endswith(".json"):
        return f"import json\njson.dump({name}, open({path!r}, 'w'))\n"
    return (
        f"import csv\nwith open({path!r}, 'w', newline='') as file:\n"
        f"    writer = csv.DictWriter(file, list({name}[0]))\n"
        f"    writer.writeheader()\n    writer.writerows({name})\n"
    )


Transformation = Callable[[random.Random, list[Person]], tuple[str, str]]
"""what to do in words, and as Python that leaves a list of dicts in `out`"""
_INTEGERS = "".join(f"    r[{field!r}] = int(r[{field!r}])\n" for field in NUMBERS)

# ----------------------------------------------------------------------------------------------- level 2


_CITY: Draw = lambda rng, people: rng.choice(people)["city"]  # noqa: E731
TRANSFORMS: dict[str, Transformation] = {
    "convert": said("keep all records as they are", "out = rows\n"),
    "by_name": said("sort the records by name", "out = sorted(rows, key=lambda r: r['name'])\n"),
    "by_age": said("sort the records by age, youngest first", "out = sorted(rows, key=lambda r: r['age'])\n"),
    "reverse": said("reverse the order of the records", "out = rows[::-1]\n"),
    "city": said("keep only the records whose city is {x}", "out = [r for r in rows if r['city'] == {x!r}]\n", _CITY),
    "above": said("keep only the records with more than {x} points", "out = [r for r in rows if r['points'] > {x}]\n",
                  lambda rng, people: sorted(p["points"] for p in people)[len(people) // 2]),
    "columns": said("keep only the fields {x} and {y}, in this order", "out = [{k: r[k] for k in [{x!r}, {y!r}]} for r in rows]\n",
                    lambda rng, people: tuple(rng.sample(("name", "age", "city", "team", "points"), 2))),
    "rename": said("rename the field {x} to {y}", "out = [{({y!r} if k == {x!r} else k): v for k, v in r.items()} for r in rows]\n",
                   lambda rng, people: (rng.choice(("age", "city", "team", "points")), rng.choice(("value", "entry", "item")))),
    "add": said("add a last field bonus, which is {x} times the points", "out = [{**r, 'bonus': r['points'] * {x}} for r in rows]\n",
                lambda rng, people: rng.randint(2, 9)),
    "top": said("keep only the {x} records with the most points, those with more points first",
                "out = sorted(rows, key=lambda r: -r['points'])[:{x}]\n", lambda rng, people: rng.randint(2, 4)),
}  # fmt: skip


def transform(of: Transformation, source: str, target: str, rng: random.Random) -> Made:
    """One change, from one form into the other."""
    people = draw_people(rng, rng.randint(5, 10))
    words, code = of(rng, people)
    return _task(rng, words, f"for r in rows:\n{_INTEGERS}{code}", {f"people.{source}": people}, target)


# ----------------------------------------------------------------------------------------------- level 3


def _pad(rng: random.Random, people: list[Person]) -> None:
    for person in rng.sample(people, 3):
        person["name"], person["city"] = f"  {person['name']}", f"{person['city'].upper()} "


def _forget(rng: random.Random, people: list[Person]) -> None:
    for person in rng.sample(people, 3):
        person["city"] = ""


def _grouped(key: str, words: str, code: str) -> Transformation:
    return said(
        f"make one record for each {key}, in alphabetical order, with the fields {key} and {words}",
        f"groups = {{}}\nfor r in rows:\n    groups.setdefault(r[{key!r}], []).append(r)\n"
        f"out = [{{{key!r}: k, {code}}} for k, g in sorted(groups.items())]\n",
    )


CLEANINGS: dict[str, Transformation] = {
    "spaces": said("strip blanks around names and cities, and write cities with one capital, as in Lima",
                   "for r in rows:\n    r['name'] = r['name'].strip()\n    r['city'] = r['city'].strip().title()\nout = rows\n", _pad),
    "doubles": said("drop every record that is the same as an earlier one", "out = []\nfor r in rows:\n    if r not in out:\n        out.append(r)\n",
                    lambda rng, people: people.extend([dict(person) for person in rng.sample(people, 3)])),
    "missing": said("drop the records without a city", "out = [r for r in rows if r['city']]\n", _forget),
    "filled": said("put {y} wherever the city is missing", "for r in rows:\n    r['city'] = r['city'] or {y!r}\nout = rows\n",
                   _forget, lambda rng, people: rng.choice(CITIES)),
    "city_count": _grouped("city", "count, the number of its people", "'count': len(g)"),
    "team_sum": _grouped("team", "total, the sum of their points", "'total': sum(r['points'] for r in g)"),
    "city_max": _grouped("city", "best, their highest points", "'best': max(r['points'] for r in g)"),
    "team_oldest": _grouped("team", "oldest, the name of the oldest", "'oldest': max(g, key=lambda r: r['age'])['name']"),
}  # fmt: skip


def clean(of: Transformation, form: str, rng: random.Random) -> Made:
    """A file is joined with a list of excuses (those named in it are left out), and then changed."""
    people = draw_people(rng, rng.randint(8, 14))
    gone = [{"name": person["name"]} for person in rng.sample(people, 2)]
    words, code = of(rng, people)
    target, other = rng.choice(("csv", "json")), "json" if form == "csv" else "csv"
    code = (
        f"for r in rows:\n{_INTEGERS}gone = [r['name'] for r in absent]\n"
        f"rows = [r for r in rows if r['name'].strip() not in gone]\n{code}"
    )
    words = f"leave out the people named in absent.{other}; then {words}"
    return _task(rng, words, code, {f"people.{form}": people, f"absent.{other}": gone}, target)


def _task(rng: random.Random, words: str, code: str, tables: dict[str, list[Person]], target: str) -> Made:
    """The first of the tables is changed, and the result is written to a file of its own."""
    files = {path: written(table, path.split(".")[1]) for path, table in tables.items()}
    names = dict(zip(("rows", "absent"), files, strict=False))
    out = f"{rng.choice(('result', 'report', 'final', 'output'))}.{target}"
    values: dict[str, Any] = {name: [dict(record) for record in tables[path]] for name, path in names.items()}
    exec(code, values)  # our own text, from the tables above
    expected = values["out"]
    form = "a list of objects, numbers as numbers"
    if target == "csv":
        form, expected = "with a header", list(csv.reader(io.StringIO(written(expected, "csv"))))
    check = StateCheck.model_validate({"kind": target, "path": out, "expected": expected})
    prompt = f"From {next(iter(files))}, {words}. Write the result to {out} ({form})."
    reading = "".join(read_source(name, path) for name, path in names.items())
    unchanged = [StateCheck(kind="text", path=path, expected=text) for path, text in files.items()]
    looks = [act("read_file", path=path) for path in files]
    program = f"{reading}{code}{write_source('out', out)}"
    return left(prompt, files, [check, *unchanged], *looks, act("python", code=program))


READ_TOOLS = ("read_file", "submit")
TOOLS = ("read_file", "python", "write_file", "submit")
FORMATS = ("csv", "json")

# ------------------------------------------------------------------------- level 0: read one small file


_FIELD: Draw = lambda rng, people: rng.choice(("name", "city", "team"))  # noqa: E731
TableQuestion = tuple[str, Callable[..., Any], tuple[Draw, ...]]
"""question, answer from the people and the drawn values, the draws"""
READING: dict[str, TableQuestion] = {
    "person": ("What is the {y} of {x}?", lambda people, x, y: next(p for p in people if p["name"] == x)[y],
               (lambda rng, people: (rng.choice(people)["name"], rng.choice(("age", "city", "team", "points"))),)),
    "first": ("What is the {x} in the first record?", lambda people, x: people[0][x], (_FIELD,)),
    "last": ("What is the {x} in the last record?", lambda people, x: people[-1][x], (_FIELD,)),
    "oldest": ("Who is the oldest? Submit the name.", lambda people: max(people, key=lambda p: p["age"])["name"], ()),
    "having": ("Who has {x} points? Submit the name.", lambda people, x: next(p["name"] for p in people if p["points"] == x),
               (lambda rng, people: rng.choice(people)["points"],)),
    "records": ("How many records are there?", len, ()),
    "before": ("Whose record stands just before that of {x}?", lambda people, x, y: y,
               (lambda rng, people: (lambda at: (people[at]["name"], people[at - 1]["name"]))(rng.randrange(1, len(people))),)),
}  # fmt: skip


def _read(of: TableQuestion, form: str, rng: random.Random) -> Made:
    people = draw_people(rng, rng.randint(3, 7))
    question, answer_of, draws = of
    gaps = draw_gaps(draws, rng, people)
    question, answer, path = filled(question, gaps), answer_of(people, *gaps.values()), f"people.{form}"
    return answered(
        f"Look into {path}. {question}", {path: written(people, form)}, answer, act("read_file", path=path)
    )


# ---------------------------------------------------------------- level 1: aggregates of a filtered file

_TEAM: Draw = lambda rng, people: rng.choice(people)["team"]  # noqa: E731
FILTERS: dict[str, Transformation] = {
    # what rows, and the condition on a row r in Python
    "all": said("of everybody", "True"),
    "city": said("of those in {x}", "r['city'] == {x!r}", _CITY),
    "team": said("of the team {x}", "r['team'] == {x!r}", _TEAM),
    "older": said("of those older than {x}", "int(r['age']) > {x}", lambda rng, people: rng.randint(25, 50)),
    "not_team": said("of those not in the team {x}", "r['team'] != {x!r}", _TEAM),
}
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
        words, condition = FILTERS[filtered](rng, people)
        question, value = AGGREGATES[aggregate]
        path = f"people.{form}"
        code = f"{read_source('rows', path)}kept = [r for r in rows if {condition}]\nprint({value})"
        kept = [r for r in people if eval(condition, {"r": r})]  # our own text, from the tables above
        if kept:
            break
    answer = eval(value, {"kept": kept})
    prompt = f"{path} holds records of people. {question.replace('{of}', words)}"
    steps = act("read_file", path=path), act("python", code=code)
    return answered(prompt, {path: written(people, form)}, answer, *steps)


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
