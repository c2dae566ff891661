"""Deletes runs of a log, and the blobs that nothing else in it needs, while other processes write.

A transaction deletes rows and writes the names of the runs' blobs into `log_unneeded`, so that an interrupted
deletion is ended by the next one. A blob of that table is then removed where no row of the log leads to it
any more, and nobody has put it within the last hour (`BlobStore.remove`): a process stores the files of a
workspace before it logs the run that needs them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from nano_shared import schema, snapshot
from nano_shared.errors import LogError, UsageError
from nano_shared.store import LogStore

_AT_ONCE = 200
"""runs of one transaction, which other writers wait for"""
_ID = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What a deletion would take, or took."""

    runs: int
    blobs: int
    bytes: int
    left: int = 0
    """blobs that were put within the last hour, or cannot be removed; the next deletion tries again"""


def plan_deletion(store: LogStore, ids: Sequence[str]) -> Deletion:
    """What deleting these runs would take. Raises as `delete_runs` does, but for runs that are executed."""
    store.read(partial(_refuse_parents, chosen=frozenset(ids)))
    size = sum(store.read(partial(_bytes, ids=some)) for some in _chunks(ids))
    taken = _unneeded(store, _blobs(store, ids), leaving=frozenset(ids))
    held = [path.stat().st_size for blob in taken if (path := store.blobs.path(blob)).exists()]
    return Deletion(runs=len(ids), blobs=len(held), bytes=size + sum(held))


def delete_runs(store: LogStore, ids: Sequence[str]) -> Deletion:
    """Delete runs with all that is said of them, and the blobs that only they need. Raises UsageError for a
    run that others go on from, which are not deleted with it, and LogError for one that another process
    executes."""
    chosen = frozenset(ids)
    store.read(partial(_refuse_parents, chosen=chosen))
    for some in _chunks(ids):
        with ExitStack() as stack:
            held = store.read(partial(_unended, ids=some))
            for run in held:
                stack.enter_context(store.claim(run))
            blobs = _blobs(store, some)
            store.database.write(partial(_delete_rows, ids=some, chosen=chosen, held=held, blobs=blobs))
    with suppress(IntegrityError):  # another process logs a run of one of the tasks just now
        store.database.write(_delete_tasks)
    return _remove_unneeded(store, len(ids))


def children(connection: sa.Connection, chosen: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(chosen run, run that goes on from it and is not chosen)"""
    runs = schema.runs.c
    for some in _chunks(chosen):
        for row in connection.execute(sa.select(runs.parent, runs.id).where(runs.parent.in_(some))):
            if row.id not in chosen:
                yield str(row.parent), str(row.id)


def _refuse_parents(connection: sa.Connection, chosen: frozenset[str]) -> None:
    for parent, child in children(connection, chosen):
        raise UsageError(f"run {child} begins with the turns of {parent}: delete both, or neither")


def _unended(connection: sa.Connection, ids: Sequence[str]) -> frozenset[str]:
    runs = schema.runs.c
    return frozenset(connection.scalars(sa.select(runs.id).where(runs.id.in_(ids), runs.stop.is_(None))))


def _delete_rows(
    connection: sa.Connection,
    ids: Sequence[str],
    chosen: frozenset[str],
    held: frozenset[str],
    blobs: set[str],
) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
    for run in ids:
        stop, _ = schema.state_of(connection, run)  # locks it
        if stop is None and run not in held:
            raise LogError(f"run {run} is gone on with by another process; wait for it, or end that process")
    _refuse_parents(connection, chosen)
    names = schema.unneeded.c.blob
    for some in _chunks(blobs):
        known = set(connection.scalars(sa.select(names).where(names.in_(some))))
        if new := [{"blob": blob} for blob in some if blob not in known]:
            connection.execute(schema.unneeded.insert(), new)
    for part in (schema.tool_calls, schema.turns, schema.verdicts, schema.requests, schema.feedback):
        connection.execute(part.delete().where(part.c.run_id.in_(ids)))
    connection.execute(schema.runs.delete().where(schema.runs.c.id.in_(ids)))


def _delete_tasks(connection: sa.Connection) -> None:
    """Delete the tasks that no run is of any more."""
    tasks, runs = schema.tasks, schema.runs
    connection.execute(tasks.delete().where(~sa.exists().where(runs.c.task_id == tasks.c.id)))


def _bytes(connection: sa.Connection, ids: Sequence[str]) -> int:
    """The bytes of the runs' turns."""
    turns = schema.turns.c
    parts = turns.context_ids, turns.sampled_ids, turns.logprobs, turns.text, turns.messages, turns.api
    length = sum((sa.func.coalesce(sa.func.length(part), 0) for part in parts), start=sa.literal(0))
    return int(connection.scalar(sa.select(sa.func.sum(length)).where(turns.run_id.in_(ids))) or 0)


def _remove_unneeded(store: LogStore, runs: int) -> Deletion:
    """Remove the blobs of deleted runs that nothing needs, those of earlier deletions too."""
    name = schema.unneeded.c.blob
    names = store.read(lambda connection: set(connection.scalars(sa.select(name))))
    removed = {blob: store.blobs.remove(blob) for blob in _unneeded(store, names)}
    left = [blob for blob, size in removed.items() if size is None]

    def forget(connection: sa.Connection) -> None:
        for some in _chunks(names.difference(left)):
            connection.execute(schema.unneeded.delete().where(name.in_(some)))

    store.database.write(forget)
    sizes = [size for size in removed.values() if size]
    return Deletion(runs=runs, blobs=len(sizes), bytes=sum(sizes), left=len(left))


# ------------------------------------------------------------------------------------------- blobs


def _blobs(store: LogStore, ids: Sequence[str]) -> set[str]:
    """The blobs that these runs lead to."""
    found: set[str] = set()
    for some in _chunks(ids):
        trees, outputs = store.read(partial(_named, ids=some))
        found |= trees | outputs
        for tree in trees:
            with suppress(LogError, snapshot.SnapshotError):  # it is lost, or no snapshot
                found.update(snapshot.blobs_of(tree, store.blobs))
    return {blob for blob in found if blob in store.blobs}


def _unneeded(store: LogStore, names: set[str], leaving: frozenset[str] = frozenset()) -> set[str]:
    """Those of the blobs that no run leads to, neither of this log, without those that are `leaving`, nor of
    another in the folder that holds the blobs' folder."""
    left = set(names)
    with ExitStack() as stack:
        logs = [store, *(stack.enter_context(other) for other in _beside(store))] if left else []
        for log in logs:
            trees, outputs = log.read(partial(_named, leaving=leaving if log is store else frozenset()))
            left -= trees | outputs
            for tree in trees:
                if left and tree in store.blobs:
                    with suppress(LogError):  # what a damaged one held cannot be had from it either
                        # not parsed, as there may be a million: whatever looks like an id is needed
                        left.difference_update(_ID.findall(store.blobs.get(tree).decode("utf-8", "replace")))
    return left


def _named(
    connection: sa.Connection, ids: Sequence[str] | None = None, leaving: frozenset[str] = frozenset()
) -> tuple[set[str], set[str]]:
    """What the rows of these runs (None: of all but those that are `leaving`) name: texts that may be ids of
    snapshots, and other blobs."""
    runs, turns, calls, said = schema.runs.c, schema.turns.c, schema.tool_calls.c, schema.feedback.c
    trees, outputs, tasks = set[str](), set[str](), set[str]()
    for run, text, found in (
        (runs.id, runs.snapshot, trees), (turns.run_id, turns.snapshot, trees),
        (calls.run_id, calls.blob, outputs), (said.run_id, said.text, trees), (runs.id, runs.task_id, tasks),
        (calls.run_id, sa.type_coerce(calls.images, sa.Text), trees),
        (turns.run_id, sa.type_coerce(turns.messages, sa.Text), trees),
    ):  # fmt: skip
        query = sa.select(run, text).where(text.is_not(None))
        rows = connection.execute(query if ids is None else query.where(run.in_(ids)))
        found.update(value for name, value in rows if name not in leaving)
    body = sa.type_coerce(schema.tasks.c.body, sa.Text)
    for some in _chunks(tasks):
        trees.update(connection.scalars(sa.select(body).where(schema.tasks.c.id.in_(some))))
    return {name for text in trees for name in _ID.findall(text)}, outputs


def _beside(store: LogStore) -> Iterator[LogStore]:
    """The other SQLite logs with blobs in the same folder. Raises LogError for an unreadable one."""
    for path in sorted(store.blobs.root.parent.glob("*.db")):
        if str(path) != store.url and _is_log(path):
            yield LogStore.open(path, create=False, blobs=store.blobs.root)


def _is_log(path: Path) -> bool:
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as file:
        try:
            found = file.execute("SELECT 1 FROM sqlite_master WHERE name = 'log_runs'").fetchone()
        except sqlite3.DatabaseError:  # another kind of file
            return False
    return found is not None


def _chunks(values: Iterable[str]) -> Iterator[list[str]]:
    several = iter(values)
    while some := list(islice(several, _AT_ONCE)):
        yield some
