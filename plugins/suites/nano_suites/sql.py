"""The suite `sql`: queries and changes of a SQLite database with the tool `sql`."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from nano_rl.tasks.suite import Made, TaskSuite
from nano_shared.hidden_checks import StateCheck
from nano_shared.types import OracleAction
from nano_suites.family import CITIES, NAMES, TEAMS, WORDS, Family, act, answered, filled, left, said, view

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

    def fill(self, text: str, **more: object) -> str:
        """The text with the names of table and columns in it, and `more`; other {gaps} stay."""
        names = {"table": self.table, "label": self.label, "kind": self.kind, "measure": self.measure}
        return filled(text, more | names)


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
        name=name, table=table, label=label, kind=kind, measure=measure,
        rows=tuple(zip(ids, labels, of_kind, measures, strict=True)),
        keepers=tuple(zip(some, rng.sample(NAMES, 4), strict=True)),
        fresh=rng.choice([word for word in WORDS if word not in labels]),
    )  # fmt: skip


ASK_TOOLS = ("sql", "submit")
READ_TOOLS = ("sql", "read_file", "submit")

Where = Callable[[random.Random, GeneratedTables], tuple[str, str]]
"""what rows are meant, in words and as a condition, with gaps for the names of columns"""


def _number(rng: random.Random, db: GeneratedTables) -> int:
    """A bound that splits the rows."""
    values = sorted(row[3] for row in db.rows)
    return int(values[rng.randint(2, len(values) - 3)])


def _kind(rng: random.Random, db: GeneratedTables) -> str:
    return rng.choice(db.rows)[2]


def _kinds(rng: random.Random, db: GeneratedTables) -> tuple[str, ...]:
    return tuple(rng.sample(sorted({row[2] for row in db.rows}), 2))


WHERE: dict[str, Where] = {
    "above": said("with {measure} above {x}", "{measure} > {x}", _number),
    "at_most": said("with {measure} of at most {x}", "{measure} <= {x}", _number),
    "between": said("with {measure} from {x} to {y}", "{measure} BETWEEN {x} AND {y}",
                    lambda rng, db: tuple(sorted((_number(rng, db), _number(rng, db))))),
    "kind": said("whose {kind} is {x}", "{kind} = '{x}'", _kind),
    "other": said("whose {kind} is not {x}", "{kind} <> '{x}'", _kind),
    "letter": said("whose {label} begins with {x}", "{label} LIKE '{x}%'", lambda rng, db: rng.choice(db.rows)[1][0]),
    "kind_above": said("whose {kind} is {x} and with {measure} above {y}", "{kind} = '{x}' AND {measure} > {y}", _kind, _number),
    "kind_or_kind": said("whose {kind} is {x} or {y}", "{kind} IN ('{x}', '{y}')", _kinds),
}  # fmt: skip
MEASURES = {
    "count": ("How many {table} are there {where}?", "count(*)"),
    "sum": ("What is the total {measure} of the {table} {where}?", "sum({measure})"),
    "max": ("What is the largest {measure} among the {table} {where}?", "max({measure})"),
    "min": ("What is the smallest {measure} among the {table} {where}?", "min({measure})"),
    "kinds": ("How many different values of {kind} have the {table} {where}?", "count(DISTINCT {kind})"),
}


def _ask(db: GeneratedTables, question: str, query: str, *, schema: bool) -> Made | None:
    """The task of a query with one value; None where it has none."""
    rows = db.ask(query)
    if len(rows) != 1 or rows[0][0] is None:
        return None
    shown = f"{db.file} has {db.schema}.\n" if schema else f"{db.file} is a SQLite database.\n"
    action = act("sql", database=db.file, statement=query)
    look = () if schema else (_look(db),)
    return answered(shown + question, db.files, rows[0][0], *look, action)


def _look(db: GeneratedTables) -> OracleAction:
    return act("sql", database=db.file, statement="SELECT sql FROM sqlite_master")


def _until(draw: Callable[[random.Random], Made | None], rng: random.Random) -> Made:
    while True:
        if (drawn := draw(rng)) is not None:
            return drawn


# ------------------------------------------------------------------- level 0: one value; level 1: filtered


def _simple(question: str, query: str, rng: random.Random) -> Made | None:
    db = draw_database(rng, rng.randint(6, 14))
    row = rng.choice(db.rows)
    question, query = (db.fill(text, id=row[0], name=row[1]) for text in (question, query))
    return _ask(db, question, query, schema=True)


SIMPLE = {
    "count": ("How many rows has {table}?", "SELECT count(*) FROM {table}"),
    "sum": ("What is the total {measure}?", "SELECT sum({measure}) FROM {table}"),
    "max": ("What is the largest {measure}?", "SELECT max({measure}) FROM {table}"),
    "min": ("What is the smallest {measure}?", "SELECT min({measure}) FROM {table}"),
    "kinds": ("How many different {kind} values are there?", "SELECT count(DISTINCT {kind}) FROM {table}"),
    "measure_of": ("What is the {measure} of {name}?", "SELECT {measure} FROM {table} WHERE {label} = '{name}'"),
    "kind_of": ("What is the {kind} of {name}?", "SELECT {kind} FROM {table} WHERE {label} = '{name}'"),
    "id_of": ("What is the id of {name}?", "SELECT id FROM {table} WHERE {label} = '{name}'"),
    "label_of": ("Which {label} has the id {id}?", "SELECT {label} FROM {table} WHERE id = {id}"),
    "first": ("Which {label} comes first in alphabetical order?", "SELECT {label} FROM {table} ORDER BY {label} LIMIT 1"),
    "last": ("Which {label} comes last in alphabetical order?", "SELECT {label} FROM {table} ORDER BY {label} DESC LIMIT 1"),
}  # fmt: skip


def _filtered(measure: str, where: Where, rng: random.Random) -> Made | None:
    db = draw_database(rng, rng.randint(12, 24))
    (words, condition), (question, selected) = where(rng, db), MEASURES[measure]
    query = f"SELECT {selected} FROM {{table}} WHERE {condition}"
    return _ask(db, db.fill(question, where=words), db.fill(query), schema=True)


# ---------------------------------------------------- level 2: groups and joins, and changes of some rows

GROUPS = {
    "largest_sum": ("Which {kind} has the largest total {measure}?", "sum({measure}) DESC"),
    "smallest_sum": ("Which {kind} has the smallest total {measure}?", "sum({measure})"),
    "most": ("Which {kind} has the most {table}?", "count(*) DESC"),
    "fewest": ("Which {kind} has the fewest {table}?", "count(*)"),
    "largest_max": ("Which {kind} has the largest single {measure}?", "max({measure}) DESC"),
    "smallest_min": ("Which {kind} has the smallest single {measure}?", "min({measure})"),
}


def _grouped(name: str, rng: random.Random) -> Made | None:
    db = draw_database(rng, rng.randint(14, 24))
    question, order = GROUPS[name]
    value = db.fill(order).removesuffix(" DESC")
    ranked = f"FROM {db.table} GROUP BY {db.kind} ORDER BY {db.fill(order)}"
    best = db.ask(f"SELECT {value} {ranked} LIMIT 2")
    if len(best) < 2 or best[0] == best[1]:
        return None
    return _ask(db, db.fill(question), f"SELECT {db.kind} {ranked} LIMIT 1", schema=False)


def _joined(measure: str, rng: random.Random) -> Made | None:
    db = draw_database(rng, rng.randint(14, 24))
    keeper = rng.choice(db.keepers)[1]
    question, selected = MEASURES[measure]
    query = (
        f"SELECT {selected} FROM {{table}} JOIN {{kind}}s ON {{kind}}s.name = {{table}}.{{kind}} "
        f"WHERE {{kind}}s.keeper = '{keeper}'"
    )
    words = f"whose {db.kind} is kept by {keeper}"
    return _ask(db, db.fill(question, where=words), db.fill(query), schema=False)


CHANGES = {
    "raise": ("Raise {measure} by {n} for all {table} {where}.", "UPDATE {table} SET {measure} = {measure} + {n} WHERE {c}"),
    "set": ("Set {measure} to {n} for all {table} {where}.", "UPDATE {table} SET {measure} = {n} WHERE {c}"),
    "delete": ("Delete all {table} {where}.", "DELETE FROM {table} WHERE {c}"),
    "double": ("Double {measure} for all {table} {where}.", "UPDATE {table} SET {measure} = {measure} * 2 WHERE {c}"),
    "retire": ("Change {kind} to retired for all {table} {where}.", "UPDATE {table} SET {kind} = 'retired' WHERE {c}"),
}  # fmt: skip


def _changed(db: GeneratedTables, prompt: str, statement: str, made: str | None = None) -> Made | None:
    """The task of a statement: every table as it leaves them; None where it changes nothing."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(db.dump)
        before = connection.total_changes
        connection.executescript(statement)
        if connection.total_changes == before and made is None:
            return None
        checks = []
        for table in (db.table, f"{db.kind}s", *([made] if made else [])):
            query = f"SELECT * FROM {table} ORDER BY 1"
            rows = [list(row) for row in connection.execute(query)]
            checks.append(StateCheck(kind="sql", path=db.file, query=query, expected=rows))
    action = act("sql", database=db.file, statement=statement)
    return left(f"{db.file} is a SQLite database. {prompt}", db.files, checks, _look(db), action)


def _change(change: str, where: Where, rng: random.Random) -> Made | None:
    db = draw_database(rng, rng.randint(8, 16))
    (words, condition), n = where(rng, db), rng.randint(2, 60)
    prompt, statement = (db.fill(text, where=words, c=condition, n=n) for text in CHANGES[change])
    return _changed(db, prompt, statement)


# ---------------------------------------------------------------- level 3: changes that need two thoughts

HARD = {
    "insert": (
        "Add to {table}: id {new}, {label} {fresh}, {kind} {one}, {measure} {n}. "
        "Then delete the row of {table} whose id is {id}.",
        "INSERT INTO {table} VALUES ({new}, '{fresh}', '{one}', {n}); DELETE FROM {table} WHERE id = {id};",
    ),
    "summary": (
        "Make a table summary with the columns {kind}, rows and total: for each {kind} of {table}, the number "
        "of rows and the total {measure}.",
        "CREATE TABLE summary AS SELECT {kind}, count(*) AS rows, sum({measure}) AS total FROM {table} "
        "GROUP BY {kind};",
    ),
    "ranking": (
        "Make a table ranking with the columns {label} and {measure}: the three {table} with the largest "
        "{measure}.",
        "CREATE TABLE ranking AS SELECT {label}, {measure} FROM {table} ORDER BY {measure} DESC LIMIT 3;",
    ),
    "keeper": (
        "Give all {table} whose {kind} is kept by {keeper} a {measure} higher by {n}.",
        "UPDATE {table} SET {measure} = {measure} + {n} WHERE {kind} IN "
        "(SELECT name FROM {kind}s WHERE keeper = '{keeper}');",
    ),
    "orphans": (
        "Delete from {kind}s every {kind} that none of the {table} has.",
        "DELETE FROM {kind}s WHERE name NOT IN (SELECT {kind} FROM {table});",
    ),
    "rename": (
        "Rename the {kind} {one} to {fresh}, in {kind}s and in {table}.",
        "UPDATE {kind}s SET name = '{fresh}' WHERE name = '{one}'; "
        "UPDATE {table} SET {kind} = '{fresh}' WHERE {kind} = '{one}';",
    ),
    "below_average": (
        "Delete all {table} whose {measure} is below the average {measure} of all {table}.",
        "DELETE FROM {table} WHERE {measure} < (SELECT avg({measure}) FROM {table});",
    ),
    "merge": (
        "Move all {table} of the {kind} {one} to the {kind} {other}, then delete {one} from {kind}s.",
        "UPDATE {table} SET {kind} = '{other}' WHERE {kind} = '{one}'; DELETE FROM {kind}s WHERE name = '{one}';",
    ),
    "archive": (
        "Make a table archive with the columns of {table}, and move all {table} with {measure} above {n} there.",
        "CREATE TABLE archive AS SELECT * FROM {table} WHERE {measure} > {n}; "
        "DELETE FROM {table} WHERE {measure} > {n};",
    ),
    "largest": (
        "Of each {kind}, keep in {table} only the row with the largest {measure}, and delete the others.",
        "DELETE FROM {table} WHERE {measure} < (SELECT max(o.{measure}) FROM {table} AS o "
        "WHERE o.{kind} = {table}.{kind});",
    ),
}


def _hard(name: str, rng: random.Random) -> Made | None:
    db = draw_database(rng, rng.randint(10, 18))
    values: dict[str, object] = {
        "n": _number(rng, db),
        "keeper": rng.choice(db.keepers)[1],
        "fresh": db.fresh,
    }
    values["one"], values["other"] = _kinds(rng, db)
    values["new"] = max(row[0] for row in db.rows) + rng.randint(1, 9)
    values["id"], values["name"], *_ = rng.choice(db.rows)
    prompt, statement = (db.fill(text, **values) for text in HARD[name])
    return _changed(db, prompt, statement, name if name in ("summary", "ranking", "archive") else None)


def _families(named: Iterable[tuple[str, Callable[[random.Random], Made | None]]]) -> Iterable[Family]:
    return (Family(name, partial(_until, draw)) for name, draw in named)


SUITE = TaskSuite(
    name="sql",
    version="1",
    about="questions to a SQLite database, and changes of it",
    views=(
        view("sql", "value", 0, ASK_TOOLS, _families((n, partial(_simple, *of)) for n, of in SIMPLE.items())),
        view("sql", "filter", 1, ASK_TOOLS, _families(
            (f"{m}+{w}", partial(_filtered, m, where)) for m in MEASURES for w, where in WHERE.items()
        )),
        view("sql", "group", 2, READ_TOOLS, _families((
            *((name, partial(_grouped, name)) for name in GROUPS),
            *((f"join+{name}", partial(_joined, name)) for name in MEASURES if name != "kinds"),
        ))),
        view("sql", "change", 2, READ_TOOLS, _families(
            (f"{c}+{w}", partial(_change, c, where)) for c in CHANGES for w, where in WHERE.items()
        )),
        view("sql", "reshape", 3, READ_TOOLS, _families((name, partial(_hard, name)) for name in HARD)),
    ),
)  # fmt: skip
