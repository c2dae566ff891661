"""The database behind the log: opens, checks and migrates it, explains its errors; its views (`views.sql`).

It is an SQLite file, or a `Database` of another kind that `nano.log_databases` registers by its scheme. Views
are dropped before a migration and created again after: a changed one needs a new (perhaps empty) migration.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from nano_shared.errors import LogError
from nano_shared.extension_points import Extensions, refuse_missing
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
        self.engine = engine
        self.name = shown_url(engine.url)
        self.blobs = blobs
        """their address, for `open_blobs`; None: a folder of this database's"""
        # threads of one process queue here instead of in SQLite's busy handler, which polls and is unfair
        self._turnstile = threading.Lock()
        self._write_ahead = WriteAhead(Path(self.name))

    @property
    def address(self) -> str:
        """Path or URL to open it again, with password and address of blobs."""
        url = self.with_blobs(self.engine.url)
        return self.name if url == self.engine.url else url.render_as_string(False)

    def with_blobs(self, url: sa.URL) -> sa.URL:
        return url if self.blobs is None else url.update_query_dict({_BLOBS: self.blobs})

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
        from filelock import FileLock

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
    from filelock import FileLock, Timeout

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


def _unlocked() -> Callable[..., Any]:
    """Repeats what found an SQLite file locked."""
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random

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


def _views() -> dict[str, str]:
    """Name -> statement that creates it, of every documented view."""
    text = Path(__file__).with_name("views.sql").read_text(encoding="utf-8")
    statements = re.sub(r"--.*", "", text).split(";")[:-1]
    return {statement.split()[2]: statement for statement in statements}


def drop_views(connection: sa.Connection) -> None:
    for name in _views():
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")


def create_views(connection: sa.Connection) -> None:
    for statement in _views().values():
        connection.exec_driver_sql(statement)
