"""`nano-coder log migrate`: copies a log into another, as stored, blobs included; SQLite, Postgres, or both.

Values are taken as the database keeps them and not read, so that damaged runs are copied too, damage and all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import sqlalchemy as sa
from typer import Argument

from nano_cluster.postgres import copy_rows
from nano_shared import schema
from nano_shared.command_line import JsonOption, emit
from nano_shared.database import Database
from nano_shared.errors import LogError
from nano_shared.printable import printable
from nano_shared.snapshot import BlobStore
from nano_shared.store import LogStore
from nano_shared.types import StopReason

_PAGE = 50
"""runs that are in memory, and in one transaction of the target, at once"""
_END = ("ended", "stop", "stop_detail", "answer", "diff")
"""columns of a run that change when it ends or is resumed"""
StoredRow = tuple[Any, ...]


@dataclass(slots=True)
class Copied:
    runs: int = 0
    turns: int = 0
    extended: int = 0
    """runs that were there, and gained turns, an end, verdicts or feedback"""
    known: int = 0
    """runs that were there with all that the source has"""
    other_rows: int = 0
    """rows that belong to no run"""
    blobs: int = 0
    known_blobs: int = 0
    damaged_blobs: list[str] = field(default_factory=list)
    """why each could not be copied"""


class _Stored:
    """A table with its values as stored; without the ids that each database gives in order of arrival."""

    def __init__(self, table: sa.Table) -> None:
        self.numbered = isinstance(table.c[0].type, sa.Integer) and table.c[0].primary_key
        self.columns = [column.name for column in table.columns][int(self.numbered) :]
        self.table = sa.table(table.name, *(sa.column(column.name) for column in table.columns))
        self.order = [self.table.c[column.name] for column in table.primary_key]
        self.name = table.name

    def rows(
        self, connection: sa.Connection, column: str, values: Sequence[Any]
    ) -> dict[Any, list[StoredRow]]:
        """Rows by the value of `column`."""
        key = self.table.c[column]
        query = sa.select(key, *(self.table.c[name] for name in self.columns))
        found: dict[Any, list[StoredRow]] = {}
        for row in connection.execute(query.where(key.in_(values)).order_by(*self.order)):
            found.setdefault(row[0], []).append(tuple(row[1:]))
        return found

    def add(self, connection: sa.Connection, rows: Sequence[StoredRow]) -> None:
        if rows and connection.dialect.name == "sqlite":
            named = [dict(zip(self.columns, row, strict=True)) for row in rows]
            connection.execute(self.table.insert(), named)
        elif rows:
            copy_rows(connection, self.name, self.columns, rows)


_TASKS, _RUNS = _Stored(schema.tasks), _Stored(schema.runs)
_TABLES = [table for table in schema.metadata.sorted_tables if table not in (schema.tasks, schema.runs)]
_PARTS = [_Stored(one) for one in _TABLES if "run_id" in one.c and one.foreign_key_constraints]
"""what belongs to a run"""
_OTHERS = [_Stored(one) for one in _TABLES if not one.foreign_key_constraints]

_StoredRun = tuple[StoredRow, list[list[StoredRow]]]
"""the run's row, and the rows of each of _PARTS"""


def copy_into(
    target: LogStore, source: LogStore, done: Copied, tell: Callable[[int], None] = lambda _runs: None
) -> None:
    """Add all that the source holds; what the target has already stays. `tell` gets the number of runs.
    Raises LogError, before anything is written, if both hold different runs of one id."""
    for ids in _pages(source.database):
        _plan(source.database, target.database, ids)
    _copy_blobs(source.blobs, target.blobs, done)  # first, so that no row names a blob that is not there
    for ids in _pages(source.database):
        _copy_page(source.database, target.database, ids, done)
        tell(done.runs + done.extended + done.known)
    for stored in _OTHERS:
        done.other_rows += _copy_others(source.database, target.database, stored)


def _copy_blobs(source: BlobStore, target: BlobStore, done: Copied) -> None:
    """Copy every blob, with its hash verified; damaged ones are left out and named."""
    for blob in source.ids() if source.address != target.address else ():
        if blob in target:
            done.known_blobs += 1
            continue
        try:
            data = source.get(blob)
        except LogError as damage:
            done.damaged_blobs.append(str(damage))
            continue
        target.put(data)
        done.blobs += 1


def _pages(database: Database) -> Iterator[list[str]]:
    key, last = _RUNS.table.c.id, ""
    while True:
        query = sa.select(key).where(key > last).order_by(key).limit(_PAGE)
        ids = list(database.read(lambda connection, q=query: connection.scalars(q).all()))  # type: ignore[misc]
        if not ids:
            return
        yield ids
        last = ids[-1]


def _load(database: Database, ids: Sequence[str]) -> dict[str, _StoredRun]:
    def work(connection: sa.Connection) -> dict[str, _StoredRun]:
        runs = _RUNS.rows(connection, "id", ids)
        parts = [part.rows(connection, "run_id", list(runs)) for part in _PARTS] if runs else []
        return {run: (rows[0], [part.get(run, []) for part in parts]) for run, rows in runs.items()}

    return database.read(work)


@dataclass(frozen=True, slots=True)
class _Lack:
    """What a run lacks that is in both logs."""

    parts: list[list[StoredRow]]
    end: bool
    """whether the source knows how it ended, and the target does not or knows an earlier end"""


def _plan(source: Database, target: Database, ids: Sequence[str]) -> dict[str, _Lack]:
    """What the runs lack that both logs have. Raises LogError for another run of the same id."""
    theirs = _load(target, ids)
    ours = _load(source, list(theirs)) if theirs else {}
    plan = {}
    for run, there in theirs.items():
        lack = _lack(ours[run], there)
        if lack is None:
            other = f"run {run} is in log {target.name} with another content"
            raise LogError(f"{other}; nothing was copied: name another log")
        plan[run] = lack
    return plan


def _lack(ours: _StoredRun, theirs: _StoredRun) -> _Lack | None:
    """None if they are different runs. Of one run, the log in which it did not come to its end has less."""
    if any(ours[0][column] != theirs[0][column] for column in _KEPT):
        return None
    behind, lacking = False, []
    for part, our_rows, their_rows in zip(_PARTS, ours[1], theirs[1], strict=True):
        if part.numbered:
            lacking.append([row for row in our_rows if row not in their_rows])
            continue
        shorter = min(len(our_rows), len(their_rows))
        ahead, behind_here = our_rows[shorter:], their_rows[shorter:]
        if our_rows[:shorter] != their_rows[:shorter]:
            return None
        if (ahead and _has_result(theirs)) or (behind_here and _has_result(ours)):
            return None
        behind |= bool(behind_here)
        lacking.append(ahead)
    if ours[0] != theirs[0] and _has_result(ours) and _has_result(theirs):
        return None
    end = not behind and not _has_result(theirs) and ours[0] != theirs[0] and ours[0][_STOP] is not None
    return _Lack(lacking, end)


def _has_result(run: _StoredRun) -> bool:
    stop = run[0][_STOP]
    return stop is not None and not StopReason(stop).ours


_KEPT = [number for number, name in enumerate(_RUNS.columns) if name not in _END]
_STOP = _RUNS.columns.index("stop")
_TURNS = [part.name for part in _PARTS].index(schema.turns.name)


def _copy_page(source: Database, target: Database, ids: Sequence[str], done: Copied) -> None:
    plan = _plan(source, target, ids)
    runs = _load(source, ids)
    fresh = [found for run, found in runs.items() if run not in plan]
    lacking = [parts for _, parts in fresh] + [lack.parts for lack in plan.values()]
    task = _RUNS.columns.index("task_id")
    tasks = source.read(lambda c: _TASKS.rows(c, "id", list({row[task] for row, _ in fresh})))

    def work(connection: sa.Connection) -> None:
        there = _TASKS.rows(connection, "id", list(tasks))
        _TASKS.add(connection, [row for name, (row,) in tasks.items() if name not in there])
        _RUNS.add(connection, [row for row, _ in fresh])
        for number, part in enumerate(_PARTS):
            part.add(connection, [row for parts in lacking for row in parts[number]])
        for run, lack in plan.items():
            if lack.end:
                values = dict(zip(_RUNS.columns, runs[run][0], strict=True))
                one = _RUNS.table.update().where(_RUNS.table.c.id == run)
                connection.execute(one.values({name: values[name] for name in _END}))

    target.write(work)
    extended = sum(any(lack.parts) or lack.end for lack in plan.values())
    done.runs += len(fresh)
    done.turns += sum(len(parts[_TURNS]) for parts in lacking)
    done.extended += extended
    done.known += len(plan) - extended


def _copy_others(source: Database, target: Database, stored: _Stored) -> int:
    """Add the rows that the target lacks; such tables are small."""
    query = sa.select(*(stored.table.c[name] for name in stored.columns)).order_by(*stored.order)

    def read(connection: sa.Connection) -> list[StoredRow]:
        return [tuple(row) for row in connection.execute(query)]

    rows = source.read(read)

    def work(connection: sa.Connection) -> int:
        there = set(read(connection))
        lacking = [row for row in rows if row not in there]
        stored.add(connection, lacking)
        return len(lacking)

    return target.write(work) if rows else 0


_EVERY = 10_000


def command(
    source: Annotated[str, Argument(metavar="FROM", help="Path of a log, or postgresql://... of one.")],
    target: Annotated[str, Argument(metavar="TO", help="The log that gains its runs; made if need be.")],
    as_json: JsonOption = False,
) -> int:
    """Copy the log FROM into the log TO, blobs too: from SQLite to Postgres, or back.

    FROM stays as it is. Repeat the command after an interruption, or when FROM has grown: what TO has already
    is left as it is. Nothing is copied if TO holds another run with the id of one of FROM's.

    \b
    nano-coder log migrate ~/log.db 'postgresql://nano@db.example/nano?blobs=/mnt/shared/blobs'
    """
    done, shown = Copied(), 0

    def tell(runs: int) -> None:
        nonlocal shown
        if runs // _EVERY > shown:
            shown = runs // _EVERY
            print(f"{runs} runs ...", file=sys.stderr)

    with LogStore.open(source, create=False) as old, LogStore.open(target) as new:
        copy_into(new, old, done, tell)
    emit(done, as_json, lambda: print(_sentence(done)))
    for damage in done.damaged_blobs:
        print(printable(f"left out: {damage}"), file=sys.stderr)
    return 1 if done.damaged_blobs else 0


def _sentence(done: Copied) -> str:
    parts = [f"copied {done.runs} runs, {done.turns} turns and {done.blobs} blobs"]
    parts += [f"{done.extended} runs were continued"] if done.extended else []
    parts += [f"{done.known} runs were there already"] if done.known else []
    parts += [f"{done.known_blobs} blobs were there already"] if done.known_blobs else []
    parts += [f"{done.other_rows} notes"] if done.other_rows else []
    parts += [f"{len(done.damaged_blobs)} damaged blobs were left out"] if done.damaged_blobs else []
    return "; ".join(parts)
