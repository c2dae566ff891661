"""Records of people as CSV and as JSON, and the Python that an oracle reads and writes them with."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Sequence
from typing import Any

from nano_rl.domains.words import CITIES, NAMES, TEAMS

Person = dict[str, Any]
FIELDS = ("name", "age", "city", "team", "points")
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
