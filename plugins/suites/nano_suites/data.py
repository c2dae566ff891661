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
from nano_suites.family import CITIES, NAMES, TEAMS, Family, act, answered, left, view

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


def _city(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    city = rng.choice(people)["city"]
    return (
        f"keep only the records whose city is {city}",
        f"out = [r for r in rows if r['city'] == {city!r}]\n",
    )


def _above(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    n = sorted(p["points"] for p in people)[len(people) // 2]
    return (
        f"keep only the records with more than {n} points",
        f"out = [r for r in rows if r['points'] > {n}]\n",
    )


def _columns(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    some = rng.sample(("name", "age", "city", "team", "points"), 2)
    keep = f"out = [{{k: r[k] for k in {some!r}}} for r in rows]\n"
    return f"keep only the fields {some[0]} and {some[1]}, in this order", keep


def _rename(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    old, new = rng.choice(("age", "city", "team", "points")), rng.choice(("value", "entry", "item"))
    code = f"out = [{{({new!r} if k == {old!r} else k): v for k, v in r.items()}} for r in rows]\n"
    return f"rename the field {old} to {new}", code


def _add(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    n = rng.randint(2, 9)
    code = f"out = [{{**r, 'bonus': r['points'] * {n}}} for r in rows]\n"
    return f"add a last field bonus, which is {n} times the points", code


def _top(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    n = rng.randint(2, 4)
    code = f"out = sorted(rows, key=lambda r: -r['points'])[:{n}]\n"
    return f"keep only the {n} records with the most points, those with more points first", code


TRANSFORMS: dict[str, Transformation] = {
    "convert": lambda rng, people: ("keep all records as they are", "out = rows\n"),
    "by_name": lambda rng, people: (
        "sort the records by name", "out = sorted(rows, key=lambda r: r['name'])\n"
    ),
    "by_age": lambda rng, people: (
        "sort the records by age, youngest first", "out = sorted(rows, key=lambda r: r['age'])\n"
    ),
    "reverse": lambda rng, people: ("reverse the order of the records", "out = rows[::-1]\n"),
    "city": _city, "above": _above, "columns": _columns, "rename": _rename, "add": _add, "top": _top,
}  # fmt: skip


def transform(of: Transformation, source: str, target: str, rng: random.Random) -> Made:
    """One change, from one form into the other."""
    people = draw_people(rng, rng.randint(5, 10))
    said, code = of(rng, people)
    return _task(rng, said, f"for r in rows:\n{_INTEGERS}{code}", {f"people.{source}": people}, target)


# ----------------------------------------------------------------------------------------------- level 3


def _spaces(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    for person in rng.sample(people, 3):
        person["name"], person["city"] = f"  {person['name']}", f"{person['city'].upper()} "
    code = (
        "for r in rows:\n    r['name'] = r['name'].strip()\n"
        "    r['city'] = r['city'].strip().title()\nout = rows\n"
    )
    return "strip blanks around names and cities, and write cities with one capital, as in Lima", code


def _doubles(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    people += [dict(person) for person in rng.sample(people, 3)]
    code = "out = []\nfor r in rows:\n    if r not in out:\n        out.append(r)\n"
    return "drop every record that is the same as an earlier one", code


def _missing(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    for person in rng.sample(people, 3):
        person["city"] = ""
    return "drop the records without a city", "out = [r for r in rows if r['city']]\n"


def _filled(rng: random.Random, people: list[Person]) -> tuple[str, str]:
    for person in rng.sample(people, 3):
        person["city"] = ""
    city = rng.choice(CITIES)
    return (
        f"put {city} wherever the city is missing",
        f"for r in rows:\n    r['city'] = r['city'] or {city!r}\nout = rows\n",
    )


def _grouped(key: str, words: str, code: str) -> Transformation:
    def change(rng: random.Random, people: list[Person]) -> tuple[str, str]:
        said = f"make one record for each {key}, in alphabetical order, with the fields {key} and {words}"
        lines = (
            f"groups = {{}}\nfor r in rows:\n    groups.setdefault(r[{key!r}], []).append(r)\n"
            f"out = [{{{key!r}: k, {code}}} for k, g in sorted(groups.items())]\n"
        )
        return said, lines

    return change


CLEANINGS: dict[str, Transformation] = {
    "spaces": _spaces, "doubles": _doubles, "missing": _missing, "filled": _filled,
    "city_count": _grouped("city", "count, the number of its people", "'count': len(g)"),
    "team_sum": _grouped("team", "total, the sum of their points", "'total': sum(r['points'] for r in g)"),
    "city_max": _grouped("city", "best, their highest points", "'best': max(r['points'] for r in g)"),
    "team_oldest": _grouped(
        "team", "oldest, the name of the oldest", "'oldest': max(g, key=lambda r: r['age'])['name']"
    ),
}  # fmt: skip


def clean(of: Transformation, form: str, rng: random.Random) -> Made:
    """A file is joined with a list of excuses (those named in it are left out), and then changed."""
    people = draw_people(rng, rng.randint(8, 14))
    gone = [{"name": person["name"]} for person in rng.sample(people, 2)]
    said, code = of(rng, people)
    target = rng.choice(("csv", "json"))
    code = (
        f"for r in rows:\n{_INTEGERS}gone = [r['name'] for r in absent]\n"
        f"rows = [r for r in rows if r['name'].strip() not in gone]\n{code}"
    )
    said = f"leave out the people named in absent.{_other(form)}; then {said}"
    return _task(rng, said, code, {f"people.{form}": people, f"absent.{_other(form)}": gone}, target)


def _other(form: str) -> str:
    return "json" if form == "csv" else "csv"


def _task(rng: random.Random, said: str, code: str, tables: dict[str, list[Person]], target: str) -> Made:
    """The first of the tables is changed, and the result is written to a file of its own."""
    files = {path: written(table, path.split(".")[1]) for path, table in tables.items()}
    names = dict(zip(("rows", "absent"), files, strict=False))
    out = f"{rng.choice(('result', 'report', 'final', 'output'))}.{target}"
    values: dict[str, Any] = {name: [dict(record) for record in tables[path]] for name, path in names.items()}
    exec(code, values)  # our own text, from the tables above
    expected = values["out"]
    if target == "json":
        check = StateCheck(kind="json", path=out, expected=expected)
    else:
        rows = list(csv.reader(io.StringIO(written(expected, "csv"))))
        check = StateCheck(kind="csv", path=out, expected=rows)
    form = "a list of objects, numbers as numbers" if target == "json" else "with a header"
    prompt = f"From {next(iter(files))}, {said}. Write the result to {out} ({form})."
    reading = "".join(read_source(name, path) for name, path in names.items())
    unchanged = [StateCheck(kind="text", path=path, expected=text) for path, text in files.items()]
    looks = [act("read_file", path=path) for path in files]
    program = f"{reading}{code}{write_source('out', out)}"
    return left(prompt, files, [check, *unchanged], *looks, act("python", code=program))


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
