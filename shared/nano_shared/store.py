"""LogStore: the log of every execution, written ahead turn by turn, and read back exactly. The only user of
SQL."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from filelock import FileLock, Timeout
from sqlalchemy.exc import DBAPIError

from nano_shared import journal, postgres, run_queries, schema, snapshot
from nano_shared.blobs import BlobStore, open_blobs
from nano_shared.database import Database, open_database
from nano_shared.errors import LogError, NanoError
from nano_shared.feedback import Feedback, Said
from nano_shared.hashing import content_hash, new_run_id
from nano_shared.journal import ClientRequest
from nano_shared.log_copy import Copied, copy_blobs, copy_log, refuse_other_runs
from nano_shared.logged_run import LoggedRun, Merged, feedback_of, load_logged, merge_run, verdicts_of
from nano_shared.notes import Notes, Scrub
from nano_shared.rows import said_from
from nano_shared.run_fact_rows import RunFilter, stream_facts
from nano_shared.run_facts import RunFacts
from nano_shared.run_queries import RunSummary
from nano_shared.types import Observation, StopReason, Task, ToolSpec, Trajectory, Turn, Verdict


@contextmanager
def claim(folder: Path, run_id: str) -> Iterator[None]:
    """Hold the run's lock file in `folder`, against other processes that share that folder.

    Raises LogError at once if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # ids of imported runs can be any text: hash them into a file name
    stem = content_hash(run_id).removeprefix("sha256:")[:24]
    owner = folder / f"{stem}.pid"
    lock = FileLock(folder / f"{stem}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise LogError(
            f"run {run_id} is being executed by another process (pid {_pid(owner)}); "
            "wait for it, or end that process"
        ) from None
    try:
        owner.write_text(str(os.getpid()))
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _pid(owner: Path) -> str:
    try:
        return owner.read_text() or "unknown"
    except FileNotFoundError:
        return "unknown"


T = TypeVar("T")

__all__ = ["LogStore", "SqlResult", "new_run_id"]


@dataclass(frozen=True, slots=True)
class SqlResult:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class LogStore:
    """The log of runs. Append-only. Safe for many threads, and for several processes on one log.

    Every method raises LogError if the log is locked for too long, damaged, read-only or out of space.
    """

    def __init__(self, database: Database, blobs: BlobStore) -> None:
        self._database = database
        self.blobs = blobs

    @classmethod
    def open(
        cls, url: str | Path | None = None, *, create: bool = True, blobs: str | Path | None = None
    ) -> LogStore:
        """Open a log by path or SQLAlchemy URL; None is `log.db` in NANO_HOME. Applies missing migrations.

        Blobs are at the address `blobs`, or that of the URL's `?blobs=` (see `open_blobs`), else in `blobs/`
        beside an SQLite file, and in NANO_HOME for a server.
        Raises LogError for a file that is no log, is newer than this program, or cannot be written.
        """
        database = open_database(url, create=create)
        return cls(database, open_blobs(blobs or database.blobs))

    @property
    def url(self) -> str:
        """Path of the SQLite file, or the URL without its password."""
        return self._database.name

    def stamp(self) -> tuple[int, ...] | None:
        """Numbers that change with every write to the log, read without asking it; None for a server."""
        if not self._database.is_sqlite:
            return None
        files = (Path(self.url), Path(f"{self.url}-wal"))
        found = [file.stat() for file in files if file.exists()]
        return tuple(number for each in found for number in (each.st_mtime_ns, each.st_size))

    @property
    def address(self) -> str:
        """The argument to `open` it again, password included: for our own processes, never to be shown."""
        return self._database.address

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> LogStore:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------ writing

    def begin(self, trajectory: Trajectory) -> None:
        """Begin a run, with the turns of its parent if it is a fork, in one transaction.

        Raises LogError if its id is taken, or if it already holds turns of its own or an end.
        """
        if trajectory.own_turns or trajectory.stop is not None or trajectory.verdict is not None:
            raise LogError(f"run {trajectory.id} has already been executed; append() takes it whole")
        if len(trajectory.turns) != trajectory.inherited:
            raise LogError(
                f"run {trajectory.id} is to begin with {trajectory.inherited} turns of its parent,"
                f" and holds {len(trajectory.turns)}"
            )

        def work(connection: sa.Connection) -> None:
            journal.insert_run(connection, trajectory)
            journal.insert_turns(connection, trajectory.id, trajectory.turns)

        self._database.write(work)

    def append_turn(self, run_id: str, turn: Turn, request: ClientRequest | None = None) -> None:
        """Add the next turn, and the client's request that it answers.

        Raises LogError for an unknown or ended run, and for a turn out of order.
        """
        self._database.write(lambda connection: journal.append_turn(connection, run_id, turn, request))

    def add_observation(self, run_id: str, turn: int, observation: Observation) -> None:
        """Add what the last call of a logged turn came to: the answer of a sub-agent. Raises LogError."""
        self._database.write(
            lambda connection: journal.insert_observation(connection, run_id, turn, observation)
        )

    def finish(
        self,
        run_id: str,
        *,
        stop: StopReason,
        stop_detail: str | None = None,
        answer: str | None = None,
        diff: str = "",
        ended: float,
        snapshot: str | None = None,
    ) -> None:
        """End a run; `snapshot` is the workspace that its last turn left, where that turn was logged without.

        Raises LogError for an unknown run, and for one that has ended already.
        """
        end = {"stop": stop, "stop_detail": stop_detail, "answer": answer, "diff": diff, "ended": ended}

        def work(connection: sa.Connection) -> None:
            journal.refuse_ended(connection, run_id)
            if snapshot is not None:
                journal.set_last_snapshot(connection, run_id, snapshot)
            journal.end_run(connection, run_id, end)

        self._database.write(work)

    def reopen(self, run_id: str) -> None:
        """Clear the end of a run so that it can be resumed. Does nothing to one that has not ended.

        Raises LogError for an unknown run, and for one that the policy ended.
        """
        self._database.write(lambda connection: journal.clear_end(connection, run_id))

    def append(self, trajectory: Trajectory) -> None:
        """Add a finished trajectory in one transaction: for imports, and rollouts of other processes."""

        def work(connection: sa.Connection) -> None:
            journal.insert_run(connection, trajectory)
            journal.insert_turns(connection, trajectory.id, trajectory.turns)
            if trajectory.verdict is not None:
                journal.insert_verdict(connection, trajectory.id, trajectory.verdict)

        self._database.write(work)

    def merge(self, runs: Callable[[], Iterable[LoggedRun]]) -> Merged:
        """Add runs in one transaction, all or none; `runs` is called again if the log was locked.

        A run that exists already gains missing verdicts and feedback. Raises LogError if the log holds
        another run with that id, and whatever `runs` raises.
        """

        def work(connection: sa.Connection) -> Merged:
            merged = Merged()
            for run in runs():
                merge_run(connection, run, merged)
            return merged

        return self._database.write(work)

    def add_verdict(self, run_id: str, verdict: Verdict) -> None:
        """Add a verdict; the newest one is the trajectory's."""
        self._database.write(lambda connection: journal.insert_verdict(connection, run_id, verdict))

    def add_feedback(self, run_id: str, *feedback: Feedback) -> list[Said]:
        """Add feedback on a run, all rows or none. Raises LogError for an unknown run."""

        def work(connection: sa.Connection) -> list[int]:
            return [journal.insert_feedback(connection, run_id, row) for row in feedback]

        ids = self._database.write(work)
        return [Said(id=i, run=run_id, feedback=row) for i, row in zip(ids, feedback, strict=True)]

    def notes(self, project: str | None, scrub: Scrub) -> Notes:
        """What agents remember of a project (None: of all)."""
        return Notes(self._database, project, scrub)

    def put_blob(self, data: bytes) -> str:
        return self.blobs.put(data)

    def get_blob(self, blob: str) -> bytes:
        return self.blobs.get(blob)

    def copy_from(
        self, source: LogStore, done: Copied, tell: Callable[[int], None] = lambda _runs: None
    ) -> None:
        """Add all that another log holds; what this one has already stays. `tell` gets the number of runs.

        Raises LogError, before anything is written, if both hold different runs of one id.
        """
        refuse_other_runs(source._database, self._database)
        copy_blobs(source.blobs, self.blobs, done)  # first, so that no row names a blob that is not there
        copy_log(source._database, self._database, done, tell)

    def claim(self, run_id: str) -> AbstractContextManager[None]:
        """Hold a run while executing it: `with store.claim(run_id): ...`.

        It is released when the process dies. Effective among processes that share an SQLite file's folder,
        and among all machines for a server. Raises LogError, on entry, if another process executes the run.
        """
        if self._database.claims is not None:
            return self._database.claims.hold(run_id)
        return claim(self._database.folder / "locks", run_id)

    # ------------------------------------------------------------------------------------ reading

    def resolve(self, run: str) -> str:
        """The id of a run given by id, by unique prefix, or as "last". Raises LogError."""
        return self._database.read(lambda connection: run_queries.resolve(connection, run, self.url))

    def get(self, run: str) -> Trajectory:
        """A run by id, by unique prefix, or as "last", equal to what was appended. Raises LogError."""

        def work(connection: sa.Connection) -> Trajectory:
            return run_queries.load(connection, run_queries.resolve(connection, run, self.url))

        return self._database.read(work)

    def earlier_tool(self, tool: ToolSpec) -> tuple[ToolSpec, float] | None:
        """The newest tool of that name that runs were given, and since when, unix seconds; None if they were
        given this very one, or none."""
        return self._database.read(lambda connection: run_queries.earlier_tool(connection, tool))

    def task(self, run_id: str) -> Task:
        """The task of a run, without loading the run. `run_id` is a whole id. Raises LogError for an unknown
        run."""
        return self._database.read(lambda connection: run_queries.load_task(connection, run_id))

    def trajectories(self, *, policy: str | None = None) -> Iterator[Trajectory]:
        """The runs, oldest first, one in memory at a time; `policy` is a policy as the user named it, or the
        id of weights that sampled a turn."""
        for heading in list(self.headings(policy=policy)):  # not those that are logged meanwhile
            yield self._database.read(partial(run_queries.load, run_id=heading.run_id))

    def facts(self, chosen: RunFilter | None = None) -> Iterator[RunFacts]:
        """The facts that decide whether each run may train, by task key and oldest first, in constant memory.

        Nothing is validated: damaged rows are returned as they are. Close the iterator if it is left early.
        """
        return self._database.stream(lambda connection: stream_facts(connection, chosen or RunFilter()))

    def runs(self, limit: int | None = None) -> list[RunSummary]:
        """The newest runs, newest last."""
        query = run_queries.select_summaries().limit(limit)
        rows = self._database.read(lambda connection: connection.execute(query).mappings().all())
        return [RunSummary(**row) for row in reversed(rows)]

    def session_runs(self, session: str, owner: str | None = None) -> list[str]:
        """Ids of the runs that a session's requests made, oldest first; `owner` None: of every owner."""
        query = run_queries.select_session(session, owner)
        return [str(row[0]) for row in self._database.read(partial(_all, query))]

    def answers(self, session: str, owner: str, conversations: Sequence[str]) -> list[tuple[str, int, str]]:
        """Run, turn and hash of the answers that left one of these conversations in an owner's session,
        newest first; at most 64."""
        query = run_queries.select_answers(session, owner, conversations)
        return [tuple(row) for row in self._database.read(partial(_all, query))]

    def left_open(self, task_prefix: str, before: float) -> list[str]:
        """Ids of the runs of tasks with that prefix that never ended, and did nothing after `before`."""
        query = run_queries.select_left_open(task_prefix, before)
        return [str(row[0]) for row in self._database.read(partial(_all, query))]

    def is_open(self, run_id: str) -> bool:
        """Whether a run of that whole id has begun and not ended, and is no conversation of a client."""
        query = run_queries.select_open(run_id)
        return bool(self._database.read(partial(_all, query)))

    def conversations(self, run_id: str) -> list[str]:
        """The hash that each turn of a client's run left, those of its parents included."""
        query = sa.select(schema.runs.c.parent, schema.runs.c.parent_step).where(schema.runs.c.id == run_id)
        rows = self._database.read(partial(_all, query))
        parent, step = rows[0] if rows else (None, None)
        table = schema.requests
        own = sa.select(table.c.conversation).where(table.c.run_id == run_id).order_by(table.c.turn)
        found = [str(row[0]) for row in self._database.read(partial(_all, own))]
        return [*(self.conversations(str(parent))[: step or 0] if parent else ()), *found]

    def read(self, query: Callable[[sa.Connection], T]) -> T:
        """The result of a function that reads over a connection, in one transaction."""
        return self._database.read(query)

    def verdicts(self, run_id: str) -> tuple[Verdict, ...]:
        """Every verdict of a run, newest last."""
        return self._database.read(lambda connection: verdicts_of(connection, run_id))

    def check_blobs(self, run_id: str, checked: set[str]) -> str | None:
        """What is wrong with the first corrupt blob of a run: of its workspaces, their files, its outputs;
        None if none is. Absent blobs, as of a log that was copied without them, are not looked at, nor those
        in `checked`, to which the others are added."""

        def ids(connection: sa.Connection) -> tuple[set[str], set[str]]:
            tables = schema.runs, schema.turns, schema.tool_calls
            keys = schema.runs.c.id, schema.turns.c.run_id, schema.tool_calls.c.run_id
            names = "snapshot", "snapshot", "blob"
            found = [
                {
                    row[0]
                    for row in connection.execute(sa.select(table.c[name]).where(key == run_id))
                    if row[0]
                }
                for table, key, name in zip(tables, keys, names, strict=True)
            ]
            return found[0] | found[1], found[2]

        trees, outputs = self._database.read(ids)
        try:
            for tree in trees - checked:
                if tree in self.blobs:
                    outputs |= set(snapshot.blobs_of(tree, self.blobs))
            for blob in outputs - checked:
                if blob in self.blobs:
                    self.blobs.get(blob)
        except NanoError as damage:
            return str(damage)
        checked |= trees | outputs
        return None

    def feedback(self, run_id: str) -> tuple[Feedback, ...]:
        return self._database.read(lambda connection: feedback_of(connection, run_id))

    def logged(self, run_id: str) -> LoggedRun:
        """A run with every verdict and all feedback, on one view of the log. `run_id` is a whole id."""
        return self._database.read(lambda connection: load_logged(connection, run_id))

    def headings(
        self, *, policy: str | None = None, since: float | None = None, by_task: bool = False
    ) -> Iterator[run_queries.Heading]:
        """Run id, start and task key of each run, a page of them in memory at a time: oldest first, or
        task by task."""
        after: run_queries.Heading | None = None
        while True:
            query = run_queries.select_headings(policy, since, by_task=by_task, after=after)
            rows = self._database.read(partial(_all, query))
            page = [run_queries.Heading(*row) for row in rows]
            yield from page
            if not page:
                return
            after = page[-1]

    def all_feedback(self, *, run: str | None = None, page: int = 1000) -> Iterator[Said]:
        """The feedback of a run, or of all, in order of arrival, `page` rows in memory at a time."""
        table, last = schema.feedback, 0
        while True:
            query = sa.select(table).where(table.c.id > last).order_by(table.c.id).limit(page)
            if run is not None:
                query = query.where(table.c.run_id == run)
            rows = self._database.read(lambda c, q=query: c.execute(q).mappings().all())  # type: ignore[misc]
            yield from map(said_from, rows)
            if len(rows) < page:
                return
            last = rows[-1]["id"]

    def sql(self, query: str) -> SqlResult:
        """Rows of one SELECT over the views (views.py). Raises LogError for a query that fails or writes."""
        try:
            return self._sql_sqlite(query) if self._database.is_sqlite else self._sql_server(query)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise LogError(f"log {self.url}: {error}; the query was: {query}") from error
        except DBAPIError as error:
            raise LogError(f"log {self.url}: {error.orig}; the query was: {query}") from error

    def _sql_sqlite(self, query: str) -> SqlResult:
        # a connection of its own: read-only, with an authorizer that allows nothing but reading (no ATTACH,
        # no VACUUM INTO)
        with closing(sqlite3.connect(f"file:{quote(self.url)}?mode=ro", uri=True)) as connection:
            connection.set_authorizer(_only_reading)
            cursor = connection.execute(query)
            columns = tuple(column[0] for column in cursor.description or ())
            return SqlResult(columns, cursor.fetchall())

    def _sql_server(self, query: str) -> SqlResult:
        if ";" in query.strip().rstrip(";"):  # a second statement could end the read-only transaction
            raise LogError(f"log {self.url}: one statement at a time, without ';'; the query was: {query}")
        return SqlResult(*postgres.user_query(self._database.engine, self.url, query))


def _all(query: sa.Select[Any], connection: sa.Connection) -> Sequence[Any]:
    return connection.execute(query).all()


def _only_reading(action: int, *_names: object) -> int:
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY
