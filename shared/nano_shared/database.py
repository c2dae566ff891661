"""The database behind the log: opens, checks and migrates it, explains its errors; its documented views.

It is an SQLite file, or a `Database` of another kind that `nano.log_databases` registers by its scheme. Views
are dropped before a migration and created again after: a changed one needs a new (perhaps empty) migration.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from filelock import FileLock, Timeout
from sqlalchemy import Connection
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random

from nano_shared.errors import LogError
from nano_shared.extensions import Extensions, refuse_missing
from nano_shared.files import WAY_OUT, content_hash, full_disk_explained, nano_home, user_path
from nano_shared.printable import without_password
from nano_shared.schema import FIRST, HEAD, VERSION_TABLE


class WriteAhead:
    """The write-ahead log of one SQLite file, with group commit.

    With synchronous=FULL a commit flushes the log while it holds the lock, so writers wait for the disk one
    after another. With NORMAL the file is always consistent, but a power cut loses the last commits. Here a
    commit is made under NORMAL, and its caller returns only after `flush`, outside the lock: one flush then
    covers the commits of other threads and processes too.
    """

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + "-wal")
        self._flushing = threading.Lock()
        self._counting = threading.Lock()
        self._committed = self._flushed = 0

    def flush(self) -> None:
        """Return once this thread's commits are on disk. Raises OSError if the disk fails."""
        with self._counting:
            self._committed += 1
            mine = self._committed
        with self._flushing:
            if self._flushed >= mine:
                return
            with self._counting:
                reached = self._committed
            # no such file: the last connection has moved it into the database file, which was flushed with it
            with suppress(FileNotFoundError):
                _flush(self._path)
            self._flushed = reached


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


T = TypeVar("T")

_BUSY_SECONDS = 30
_ATTEMPTS = 5
_WRITE = {"nano_write": True}

_EXPLANATIONS = {
    "file is not a database": "it is not an SQLite file; name another file, or move this one away",
    "malformed": "it is damaged ({cause}); restore a copy, or try `sqlite3 FILE .recover`",
    "disk is full": f"no space left ({{cause}}): {WAY_OUT}",
    "disk i/o error": f"the disk refused ({{cause}}): check it, {WAY_OUT}",
    "readonly database": "it cannot be written ({cause}); check the permissions of the file and its folder",
    "unable to open database file": "it cannot be opened; check the permissions of the file and its folder",
    "database is locked": f"another process held it for over {_BUSY_SECONDS} s; try again when that is done",
}


class Database:
    """The log in one SQLite file, and the base of databases of other kinds.

    Writes are short transactions that take the lock at their beginning, so that none fails midway. A write
    that has returned survives kill -9 and a power cut (see WriteAhead).
    """

    views: ClassVar[dict[str, Any]] = {}
    """execution options under which a transaction is on one view of the log"""

    def __init__(self, engine: sa.Engine, blobs: str | None = None) -> None:
        """`blobs` is their address, for `open_blobs`; None: a folder of this database's."""
        self.engine = engine
        self.name = shown_url(engine.url)
        self._blobs = blobs
        # threads of one process queue here instead of in SQLite's busy handler, which polls and is unfair
        self._turnstile = threading.Lock()
        self._write_ahead = WriteAhead(Path(self.name))

    @property
    def address(self) -> str:
        """Path or URL to open it again, with password and address of blobs."""
        url = self.with_blobs(self.engine.url)
        return self.name if url == self.engine.url else url.render_as_string(False)

    def with_blobs(self, url: sa.URL) -> sa.URL:
        return url if self._blobs is None else url.update_query_dict({_BLOBS: self._blobs})

    @property
    def blobs(self) -> str:
        """Address of the blobs, for `open_blobs`."""
        return self._blobs or str(self.folder / "blobs")

    @property
    def folder(self) -> Path:
        """Of blobs and locks."""
        return Path(str(self.engine.url.database)).parent

    def stamp(self) -> tuple[int, ...] | None:
        """Numbers that change with every write, read without asking the database; None where there are
        none."""
        files = (Path(self.name), Path(f"{self.name}-wal"))
        found = [file.stat() for file in files if file.exists()]
        return tuple(number for each in found for number in (each.st_mtime_ns, each.st_size))

    def prepare(self, create: bool) -> None:
        """Check the database when it is opened, and make or migrate it. Raises LogError."""
        _check_file(Path(self.name), create)
        if not self.is_outdated(create):
            return
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / "migrate.lock"):
            if self.is_outdated(create):
                self.upgrade()

    def upgrade(self) -> None:
        # the mode is persistent, and cannot be changed inside a transaction
        with self.engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute("PRAGMA journal_mode=WAL")
        self.engine.dispose()  # connections read the mode when they are made
        self.write(migrate)

    def is_outdated(self, create: bool) -> bool:
        """Whether it has to be migrated. Raises LogError for one that cannot be, and for an empty one that
        is not to be created."""
        with self.engine.connect() as connection:
            tables = sa.inspect(connection).get_table_names()
            revision = revision_of(connection, tables)
        if revision is None and tables:
            raise LogError(
                f"log {self.name} is some other program's database (it has tables {', '.join(tables[:3])}"
                f"{', ...' if len(tables) > 3 else ''}); name another"
            )
        if revision is None and not create:
            raise LogError(f"log {self.name} is empty; run a task first, or name another log")
        if revision is not None and revision > HEAD:
            raise LogError(
                f"log {self.name} was written by a newer nano (schema {revision}, this one knows {HEAD}); "
                "upgrade nano, or name another log"
            )
        return revision != HEAD

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on a consistent view of the log."""
        with self.explained():
            return self.read_once(work)

    def read_once(self, work: Callable[[sa.Connection], T]) -> T:
        with self.engine.connect().execution_options(**self.views) as connection, connection.begin():
            return work(connection)

    def stream(self, work: Callable[[sa.Connection], Iterator[T]]) -> Iterator[T]:
        """Yield from `work` on a consistent view of the log, which is held until the end."""
        with self.explained(), self.engine.connect().execution_options(**self.views) as connection:
            with connection.begin():
                yield from work(connection)

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one transaction; repeated from its beginning if the database was locked or away."""
        with self.explained():
            result: T = _unlocked()(self.write_once, work)
            with full_disk_explained(Path(self.name)):
                self._write_ahead.flush()
            return result

    def write_once(self, work: Callable[[sa.Connection], T]) -> T:
        with self._turnstile, self.engine.connect().execution_options(**_WRITE) as connection:
            with connection.begin():
                return work(connection)

    def query(self, sql: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Columns and rows of a user's query, which may only read."""
        # a connection of its own: read-only, with an authorizer that allows nothing but reading (no ATTACH,
        # no VACUUM INTO)
        with closing(sqlite3.connect(f"file:{quote(self.name)}?mode=ro", uri=True)) as connection:
            connection.set_authorizer(_only_reading)
            cursor = connection.execute(sql)
            return tuple(column[0] for column in cursor.description or ()), cursor.fetchall()

    def claim(self, run_id: str) -> AbstractContextManager[None]:
        """Hold a run against other processes; it is released when this one dies. Raises LogError, on entry,
        if another process holds it."""
        return _claim(self.folder / "locks", run_id)

    def overwrite_deleted(self) -> None:
        """Overwrite what was deleted, and what it left in the write-ahead log."""
        with self.engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            driver.execute("VACUUM")
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def explanation(self, error: DBAPIError) -> str | None:
        """What happened and the way out; None for an error of the program."""
        cause = str(error.orig)
        found = next((text for symptom, text in _EXPLANATIONS.items() if symptom in cause.lower()), None)
        if found is None and isinstance(error, sa.exc.OperationalError):
            return cause.strip()
        return found and found.format(cause=cause)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns the database's errors into LogErrors that name the log and the way out."""
        try:
            yield
        except PoolTimeout as error:
            raise LogError(f"log {self.name}: too many threads use it at once ({error})") from error
        except DBAPIError as error:
            if (explanation := self.explanation(error)) is None:
                raise
            raise LogError(f"log {self.name}: {explanation}") from error

    def close(self) -> None:
        self.engine.dispose()


OpenDatabase = Callable[[sa.URL, str | None], Database]
"""opens a URL; the second is the address of blobs, if one is named"""
DATABASES: Extensions[OpenDatabase] = Extensions("nano.log_databases")


@contextmanager
def _claim(folder: Path, run_id: str) -> Iterator[None]:
    """Hold the run's lock file in `folder`, against other processes that share that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # ids of imported runs can be any text: hash them into a file name
    stem = content_hash(run_id).removeprefix("sha256:")[:24]
    owner = folder / f"{stem}.pid"
    lock = FileLock(folder / f"{stem}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        pid = owner.read_text() if owner.exists() else ""
        raise LogError(
            f"run {run_id} is being executed by another process (pid {pid or 'unknown'}); "
            "wait for it, or end that process"
        ) from None
    try:
        owner.write_text(str(os.getpid()))
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _only_reading(action: int, *_names: object) -> int:
    allowed = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if action in allowed else sqlite3.SQLITE_DENY


def _unlocked() -> Retrying:
    """Repeats what found an SQLite file locked."""
    return Retrying(
        retry=retry_if_exception(_is_locked),
        stop=stop_after_attempt(_ATTEMPTS) | stop_after_delay(_BUSY_SECONDS),
        wait=wait_random(0.01, 0.2),
        reraise=True,
    )


def open_database(url: str | Path | None, *, create: bool) -> Database:
    """Open the log's database; check it, and create or migrate it if needed. Raises LogError."""
    database = _connect(url)
    with ExitStack() as undo, database.explained():
        undo.callback(database.close)
        database.prepare(create)
        undo.pop_all()
    return database


def migrate(connection: sa.Connection) -> None:
    """Apply all migrations in the connection's transaction, and make the views anew."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    drop_views(connection)
    if (revision_of(connection) or FIRST) < FIRST:  # of before the first release: the first migration adds
        connection.execute(sa.text(f"DELETE FROM {VERSION_TABLE}"))
    command.upgrade(config, HEAD)
    create_views(connection)


def _connect(url: str | Path | None) -> Database:
    if url is None:
        url = nano_home() / "log.db"
    blobs = None
    if isinstance(url, str) and "://" in url:
        parsed, blobs = _parse(url)
        if (scheme := parsed.drivername) != "sqlite":
            return DATABASES.find(scheme)(parsed, blobs)
        if parsed.database in (None, "", ":memory:"):
            raise LogError(f"log {url}: a log in memory would keep nothing; name a file")
        url = Path(str(parsed.database))
    path = user_path(url).absolute()
    if path.is_dir():
        raise LogError(f"log {path} is a directory; name the file in it, for example {path / 'log.db'}")
    file = sa.URL.create("sqlite", database=str(path))
    engine = sa.create_engine(file, connect_args={"timeout": _BUSY_SECONDS}, max_overflow=-1)
    sa.event.listen(engine, "connect", _on_connect)
    sa.event.listen(engine, "begin", _on_begin)
    return Database(engine, blobs)


_BLOBS = "blobs"


def _parse(url: str) -> tuple[sa.URL, str | None]:
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError) as error:
        raise LogError(
            f"{without_password(url)!r} is not a database URL; one is sqlite:////path/log.db"
        ) from error
    scheme = {"postgres": "postgresql", "postgresql+psycopg": "postgresql"}.get(parsed.drivername)
    parsed = parsed.set(drivername=scheme or parsed.drivername)
    refuse_missing(DATABASES.group, parsed.drivername)
    if parsed.drivername not in ("sqlite", *DATABASES):
        raise LogError(
            f"log {shown_url(parsed)}: its database driver is not installed; a log is in SQLite, or in"
            " Postgres: postgresql://user@host/database"
        )
    blobs = parsed.query.get(_BLOBS)
    if isinstance(blobs, tuple) or blobs == "":
        raise LogError(f"log {shown_url(parsed)}: ?{_BLOBS}= names one folder or bucket")
    return parsed.difference_update_query([_BLOBS]), blobs


def _on_connect(dbapi_connection: Any, _record: Any) -> None:
    # the driver begins transactions late and commits before DDL, so we begin them ourselves
    dbapi_connection.isolation_level = None
    dbapi_connection.execute("PRAGMA foreign_keys=ON")
    (mode,) = dbapi_connection.execute("PRAGMA journal_mode").fetchone()
    # without a write-ahead log (new file, file system without shared memory) only FULL is safe
    dbapi_connection.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")


def _on_begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("nano_write")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _check_file(path: Path, create: bool) -> None:
    if not path.exists():
        if not create:
            raise LogError(f"there is no log at {path}; run a task first, or name another log")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LogError(f"log {path}: cannot make its folder ({error.strerror}); {_ELSEWHERE}") from error
    for needed in (path.parent, path) if path.exists() else (path.parent,):
        if not os.access(needed, os.W_OK):
            raise LogError(f"log {path}: {needed} is not writable for this user; {_ELSEWHERE}")


_ELSEWHERE = "change its permissions, or keep the log elsewhere (NANO_HOME)"


def revision_of(connection: sa.Connection, tables: Sequence[str] | None = None) -> str | None:
    # in one query: tables that another process commits a moment later are all missing, or all there
    if VERSION_TABLE not in (sa.inspect(connection).get_table_names() if tables is None else tables):
        return None
    revision = connection.scalar(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return None if revision is None else str(revision)


def _is_locked(error: BaseException) -> bool:
    return isinstance(error, SQLAlchemyError) and "database is locked" in str(error)


def shown_url(url: sa.URL) -> str:
    """A path, or a URL without its password."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    if "password" in url.query:
        url = url.update_query_dict({"password": "***"})
    return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)


_NEWEST = "(SELECT max(n.id) FROM log_verdicts n WHERE n.run_id = r.id)"
_LAST_TURN = "(SELECT max(n.turn) FROM log_turns n WHERE n.run_id = r.id)"
_TURNS = "FROM log_turns t WHERE t.run_id = r.id"


@dataclass(frozen=True, slots=True)
class SqlView:
    """A view: `columns` maps a name to its SQL expression and its meaning; times are unix seconds."""

    name: str
    about: str
    columns: dict[str, tuple[str, str]]
    source: str

    @property
    def sql(self) -> str:
        selected = ", ".join(f"{expression} AS {name}" for name, (expression, _) in self.columns.items())
        return f"CREATE VIEW {self.name} AS SELECT {selected} FROM {self.source}"


RUNS = SqlView(
    "runs",
    "One row for each execution.",
    {
        "id": ("r.id", "run id; sorts by time"),
        "task_key": ("k.key", "durable name of the task"),
        "task_id": ("r.task_id", "content hash of the task"),
        "prompt": ("k.prompt", "what was asked"),
        "split": ("k.split", "train, test or NULL"),
        "level": ("k.level", "difficulty, from 0"),
        "family": ("k.family", "program family; splits never share one"),
        "policy": ("r.policy", "the policy as the user named it"),
        "policy_id": (
            f"(SELECT t.policy_id {_TURNS} AND t.turn = {_LAST_TURN})",
            "weights that sampled the last turn; NULL before the first",
        ),
        "stop": ("r.stop", "why it ended; NULL while it runs or after it was killed"),
        "stop_detail": ("r.stop_detail", "the stop reason in words"),
        "reward": ("v.reward", "of the newest verdict; NULL where there is none, or where it does not count"),
        "trust": ("v.trust", "of the newest verdict: hidden, user_check, judge or none"),
        "grader": ("v.grader", "of the newest verdict: name and version"),
        "failure_kind": ("v.failure_kind", "of the newest verdict"),
        "turns": (f"(SELECT count(*) {_TURNS})", "finished turns"),
        "context_tokens": (f"(SELECT coalesce(sum(t.context_tokens), 0) {_TURNS})", "tokens read, mask 0"),
        "sampled_tokens": (
            f"(SELECT coalesce(sum(t.sampled_tokens), 0) {_TURNS} AND t.turn >= coalesce(r.parent_step, 0))",
            "tokens sampled, mask 1; a fork's own",
        ),
        "trainable": (
            f"CASE WHEN EXISTS (SELECT 1 {_TURNS}) "
            f"AND NOT EXISTS (SELECT 1 {_TURNS} AND t.token_row IS NULL) THEN 1 ELSE 0 END",
            "1 where each turn holds its token ids and log-probs; 0 marks a text-only run",
        ),
        "answer": ("r.answer", "given to submit"),
        "diff": ("r.diff", "unified diff of the workspace"),
        "started": ("r.started", "unix seconds"),
        "ended": ("r.ended", "unix seconds; NULL while it runs"),
        "seconds": ("r.ended - r.started", "wall clock"),
        "parent": ("r.parent", "run this one was forked from"),
        "parent_step": ("r.parent_step", "turns taken over from the parent; they are the first of the run"),
        "seed": ("r.seed", "of the run"),
        "snapshot": ("r.snapshot", "workspace before the first action, a blob id"),
        "directory": (
            "r.directory",
            "what the workspace is a copy of; NULL for a task with its own files",
        ),
        "profile": ("r.profile", "interface profile"),
        "profile_hash": ("r.profile_hash", "its content hash"),
        "template_hash": ("r.template_hash", "of the chat template"),
        "tools_hash": ("r.tools_hash", "of the tools' schemas"),
        "runtime_version": ("r.runtime_version", "of nano"),
    },
    f"log_runs r JOIN log_tasks k ON k.id = r.task_id LEFT JOIN log_verdicts v ON v.id = {_NEWEST}",
)

TURNS = SqlView(
    "turns",
    "One row for each call of the policy and what followed.",
    {
        "run_id": ("t.run_id", "run"),
        "turn": ("t.turn", "from 0"),
        "policy_id": ("t.policy_id", "weights that sampled"),
        "policy_version": ("t.policy_version", "optimizer steps behind the weights"),
        "text": ("t.text", "raw completion as sampled"),
        "thought": ("t.thought", "text beside the calls"),
        "finish": ("t.finish", "stop or length"),
        "parse_error": ("t.parse_error", "what was wrong where no call could be read"),
        "parser": ("t.parser", "dialect that read the completion"),
        "repairs": ("t.repairs", "liberties the parser and the tools took, a JSON list"),
        "tool_calls": (
            "(SELECT count(*) FROM log_tool_calls c WHERE c.run_id = t.run_id AND c.turn = t.turn)",
            "calls and observations of the turn",
        ),
        "context_tokens": ("t.context_tokens", "tokens appended before sampling; NULL on a text-only turn"),
        "sampled_tokens": ("t.sampled_tokens", "tokens sampled; NULL on a text-only turn"),
        "token_row": ("t.token_row", "grows where history was rewritten"),
        "context_ids": ("t.context_ids", "blob of little-endian uint32"),
        "sampled_ids": ("t.sampled_ids", "blob of little-endian uint32"),
        "logprobs": ("t.logprobs", "blob of little-endian float64, one for each sampled id"),
        "sampling": ("t.sampling", "sampling parameters, JSON"),
        "snapshot": ("t.snapshot", "workspace after the turn, a blob id"),
        "started": ("t.started", "unix seconds"),
        "ended": ("t.ended", "unix seconds"),
        "seconds": ("t.ended - t.started", "wall clock"),
        "delegated_by": ("t.delegated_by", "of a sub-agent: the turn that delegated to it; else NULL"),
        "api": ("t.api", "calls, reasoning, usage and cost as an API returned them, JSON; else NULL"),
    },
    "log_turns t",
)

REQUESTS = SqlView(
    "requests",
    "One row for each request of a client of `nano-coder serve`.",
    {
        "run_id": ("q.run_id", "run"),
        "turn": ("q.turn", "the turn that answers it, from 0"),
        "session": ("q.session", "name of its session; empty where it named none"),
        "client": ("q.client", "user agent"),
        "conversation": ("q.conversation", "hash of all messages up to the answer"),
        "owner": ("q.owner", "hash of the client's key, to whom the session belongs; empty without one"),
    },
    "log_requests q",
)

TOOL_CALLS = SqlView(
    "tool_calls",
    "One row for each action and what really happened.",
    {
        "run_id": ("c.run_id", "run"),
        "turn": ("c.turn", "turn, from 0"),
        "position": ("c.position", "within the turn, from 0"),
        "tool": ("coalesce(c.call_name, c.tool)", "tool that was called"),
        "arguments": ("c.arguments", "JSON object; NULL where an observation answers no call"),
        "ok": ("c.ok", "whether it succeeded; NULL where the call was never executed"),
        "observation": ("c.text", "exactly as shown to the model"),
        "exit_code": ("c.exit_code", "NULL where no program ran, or a signal ended it"),
        "signal": ("c.signal", "that ended it"),
        "timed_out": ("c.timed_out", "whether it ran past its limit"),
        "bytes_total": ("c.bytes_total", "size of the full output"),
        "truncated": ("c.truncated", "whether the model saw less than that"),
        "blob": ("c.blob", "the full output where it was truncated"),
        "files_changed": ("c.files_changed", "JSON list of paths"),
        "denied_network": ("c.denied_network", "network accesses the sandbox refused"),
        "denied_secrets": ("c.denied_secrets", "reads of secrets it refused"),
        "denied_writes_outside": ("c.denied_writes_outside", "writes outside the workspace it refused"),
        "started": ("c.started", "unix seconds"),
        "ended": ("c.ended", "unix seconds"),
        "seconds": ("c.ended - c.started", "wall clock"),
    },
    "log_tool_calls c",
)

VERDICTS = SqlView(
    "verdicts",
    "One row for each judgement; several graders and versions stand side by side.",
    {
        "id": ("v.id", "the largest of a run is its newest"),
        "run_id": ("v.run_id", "run"),
        "reward": ("v.reward", "NULL: a failure that the policy could not cause"),
        "components": ("v.components", "JSON object of name and score"),
        "turn_rewards": ("v.turn_rewards", "JSON list, one for each turn, or NULL"),
        "checks": ("v.checks", "JSON object of name and pass, fail, error or timeout"),
        "tampering": ("v.tampering", "JSON list of findings"),
        "failure_kind": ("v.failure_kind", "what went wrong, by name"),
        "trust": ("v.trust", "hidden, user_check, judge or none"),
        "grader": ("v.grader", "name and version"),
        "graded_hash": ("v.graded_hash", "content hash of what was graded"),
        "check_run": ("v.check_run", "JSON of a check by command: exit code, end of its output; or NULL"),
        "created": ("v.created", "unix seconds"),
    },
    "log_verdicts v",
)

FEEDBACK = SqlView(
    "feedback",
    "One row for each thing said about a run, a turn or a span.",
    {
        "id": ("f.id", "in order of arrival"),
        "run_id": ("f.run_id", "run"),
        "turn": ("f.turn", "NULL speaks of the whole run"),
        "span_start": ("f.span_start", "first character within the turn's text"),
        "span_end": ("f.span_end", "one past the last"),
        "kind": ("f.kind", "accept, reject, edit, thumb, note or outcome"),
        "value": ("f.value", "+1 or -1 for thumbs, or a score"),
        "text": ("f.text", "note, edited text, or outcome in words"),
        "author": ("f.author", "who said it"),
        "created": ("f.created", "unix seconds"),
    },
    "log_feedback f",
)

VIEWS = (RUNS, TURNS, REQUESTS, TOOL_CALLS, VERDICTS, FEEDBACK)


def drop_views(connection: Connection) -> None:
    for view in VIEWS:
        _run(connection, f"DROP VIEW IF EXISTS {view.name}")


def create_views(connection: Connection) -> None:
    for view in VIEWS:
        _run(connection, view.sql)


def _run(connection: Connection, sql: str) -> Any:
    return connection.exec_driver_sql(sql)
