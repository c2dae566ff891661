"""Small SQLite databases for the suite `sql`: a table of items, and a table of their kinds."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from nano_suites.family import CITIES, NAMES, TEAMS, WORDS

_THEMES = (
    # file, table, label, kind, measure, kinds
    ("shop", "products", "title", "section", "price", ("garden", "kitchen", "office", "sports", "toys")),
    ("staff", "employees", "name", "team", "salary", TEAMS[:6]),
    ("library", "books", "title", "genre", "pages", ("crime", "fantasy", "history", "poetry", "science")),
    ("fleet", "trucks", "plate", "depot", "mileage", CITIES[:6]),
    ("farm", "fields", "name", "crop", "area", ("barley", "maize", "oats", "rye", "wheat")),
    ("museum", "paintings", "title", "room", "value", ("blue", "east", "north", "south", "west")),
    ("school", "pupils", "name", "house", "points", ("alpha", "beta", "delta", "gamma", "omega")),
    ("port", "ships", "name", "flag", "tons", ("chile", "ghana", "japan", "malta", "norway")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTables:
    """A database as the SQL that makes it; `rows` are (id, label, kind, measure), measures distinct."""

    name: str
    table: str
    label: str
    kind: str
    measure: str
    rows: tuple[tuple[int, str, str, int], ...]
    keepers: tuple[tuple[str, str], ...]
    """(kind, keeper); some kinds may have no row"""
    fresh: str
    """a word that occurs nowhere in it"""

    @property
    def file(self) -> str:
        return f"{self.name}.db"

    @property
    def schema(self) -> str:
        return f"the table {self.table} (id, {self.label}, {self.kind}, {self.measure})"

    @property
    def dump(self) -> str:
        lines = [
            f"CREATE TABLE {self.table} (id INTEGER PRIMARY KEY, {self.label} TEXT, {self.kind} TEXT, "
            f"{self.measure} INTEGER);",
            *(f"INSERT INTO {self.table} VALUES ({i}, '{n}', '{k}', {m});" for i, n, k, m in self.rows),
            f"CREATE TABLE {self.kind}s (name TEXT, keeper TEXT);",
            *(f"INSERT INTO {self.kind}s VALUES ('{kind}', '{keeper}');" for kind, keeper in self.keepers),
        ]
        return "\n".join(lines) + "\n"

    @property
    def files(self) -> dict[str, str]:
        return {f"{self.name}.sql": self.dump}

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.executescript(self.dump)
            return connection.execute(query).fetchall()

    def fill(self, text: str, row: tuple[int, str, str, int] | None = None) -> str:
        """The text with the names of table and columns in it, and of a row; other {gaps} stay."""
        named = {"table": self.table, "label": self.label, "kind": self.kind, "measure": self.measure}
        if row is not None:
            named |= {"id": str(row[0]), "name": row[1]}
        for key, value in named.items():
            text = text.replace(f"{{{key}}}", value)
        return text


def draw_database(rng: random.Random, n: int) -> GeneratedTables:
    """A database of `n` rows."""
    name, table, label, kind, measure, kinds = rng.choice(_THEMES)
    some = rng.sample(kinds, 4)
    used = some[: rng.choice((3, 4))]
    labels = rng.sample(NAMES if label == "name" and name != "farm" else WORDS, n)
    ids = sorted(rng.sample(range(1, 100), n))
    measures = rng.sample(range(20, 3000), n)
    # each kind in use has a row, so that no question is about nothing
    of_kind = [used[i] if i < len(used) else rng.choice(used) for i in range(n)]
    rng.shuffle(of_kind)
    return GeneratedTables(
        name=name,
        table=table,
        label=label,
        kind=kind,
        measure=measure,
        rows=tuple(zip(ids, labels, of_kind, measures, strict=True)),
        keepers=tuple(zip(some, rng.sample(NAMES, 4), strict=True)),
        fresh=rng.choice([word for word in WORDS if word not in labels]),
    )
