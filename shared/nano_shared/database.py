"""The database behind the log: opens, checks and migrates it, and explains its errors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from filelock import FileLock
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random

from nano_shared import postgres
from nano_shared.durable import WAY_OUT, full_disk_explained, user_path
from nano_shared.errors import LogError
from nano_shared.printable import without_password
from nano_shared.schema import FIRST, HEAD, VERSION_TABLE
from nano_shared.scratch import nano_home
from nano_shared.sql_views import create_views, drop_views


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
    """One engine. Writes are short transactions that take the lock at their beginning, so that none fails
    midway.

    A write that has returned survives kill -9 and a power cut (see WriteAhead).
    """

    def __init__(self, engine: sa.Engine, blobs: str | None = None) -> None:
        self.engine = engine
        self._blobs = blobs
        self.is_sqlite = engine.dialect.name == "sqlite"
        self.name = _name(engine.url)
        self._file = Path(self.name)
        # threads of one process queue here instead of in SQLite's busy handler, which polls and is unfair
        self._turnstile = threading.Lock() if self.is_sqlite else nullcontext()
        self._write_ahead = WriteAhead(self._file) if self.is_sqlite else None
        self._retrying = _unlocked() if self.is_sqlite else postgres.retrying()
        self.claims = None if self.is_sqlite else postgres.Claims(engine)

    @property
    def address(self) -> str:
        """Path or URL to open it again, with password and address of blobs."""
        url = self.engine.url.set(drivername=self.engine.dialect.name)
        if self._blobs is not None:
            url = url.update_query_dict({_BLOBS: self._blobs})
        return self.name if self.is_sqlite and self._blobs is None else url.render_as_string(False)

    @property
    def blobs(self) -> str:
        """Address of the blobs, for `open_blobs`."""
        return self._blobs or str(self.folder / "blobs")

    @property
    def folder(self) -> Path:
        """Folder of blobs and locks: beside an SQLite file, else in NANO_HOME."""
        if self.is_sqlite:
            return Path(str(self.engine.url.database)).parent
        return nano_home()

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on a consistent view of the log."""

        def once() -> T:
            with self._snapshot() as connection, connection.begin():
                return work(connection)

        with explained(self.name):
            return once() if self.is_sqlite else self._retrying(once)

    def stream(self, work: Callable[[sa.Connection], Iterator[T]]) -> Iterator[T]:
        """Yield from `work` on a consistent view of the log, which is held until the end."""
        with explained(self.name), self._snapshot() as connection, connection.begin():
            yield from work(connection)

    def _snapshot(self) -> sa.Connection:
        """SQLite's transactions are on one view of the file; a server's are by a level of isolation."""
        level = {} if self.is_sqlite else {"isolation_level": "REPEATABLE READ"}
        return self.engine.connect().execution_options(**level)

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in one transaction; repeated from its beginning if the database was locked or away."""
        with explained(self.name):
            result: T = self._retrying(self._write_once, work)
            if self.claims is not None:
                self.claims.renew()
            if self._write_ahead is not None:
                with full_disk_explained(self._file):
                    self._write_ahead.flush()
            return result

    def _write_once(self, work: Callable[[sa.Connection], T]) -> T:
        with self._turnstile, self.engine.connect().execution_options(**_WRITE) as connection:
            if not self.is_sqlite:
                return postgres.write_once(self.engine, connection, work)
            with connection.begin():
                return work(connection)

    def close(self) -> None:
        if self.claims is not None:
            self.claims.close()
        self.engine.dispose()


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
    resolved, blobs = _resolve(url)
    database = Database(_engine(resolved), blobs)
    with ExitStack() as undo, explained(database.name):
        undo.callback(database.close)
        _check_file(database, create)
        _check_revision(database, create)
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
    if (_revision_of(connection) or FIRST) < FIRST:  # of before the first release: the first migration adds
        connection.execute(sa.text(f"DELETE FROM {VERSION_TABLE}"))
    command.upgrade(config, HEAD)
    create_views(connection)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns the database's errors into LogErrors that name the log and the way out."""
    try:
        yield
    except PoolTimeout as error:
        raise LogError(f"log {name}: too many threads use it at once ({error})") from error
    except DBAPIError as error:
        cause = str(error.orig)
        if hasattr(error.orig, "sqlstate"):
            if (explanation := postgres.explanation(error)) is not None:
                raise LogError(f"log {name}: {explanation}") from error
            raise
        for symptom, explanation in _EXPLANATIONS.items():
            if symptom in cause.lower():
                raise LogError(f"log {name}: {explanation.format(cause=cause)}") from error
        if isinstance(error, sa.exc.OperationalError):
            raise LogError(f"log {name}: {cause.strip()}") from error
        raise


def _resolve(url: str | Path | None) -> tuple[sa.URL, str | None]:
    """The URL that the driver takes, and the address of blobs if one is named."""
    if url is None:
        url = nano_home() / "log.db"
    blobs = None
    if isinstance(url, str) and "://" in url:
        parsed, blobs = _parse(url)
        if parsed.get_backend_name() == "postgresql":
            return parsed, blobs
        if parsed.database in (None, "", ":memory:"):
            raise LogError(f"log {url}: a log in memory would keep nothing; name a file")
        url = Path(str(parsed.database))
    path = user_path(url).absolute()
    if path.is_dir():
        raise LogError(f"log {path} is a directory; name the file in it, for example {path / 'log.db'}")
    return sa.URL.create("sqlite", database=str(path)), blobs


_BLOBS = "blobs"
_SCHEMES = ("sqlite", "postgresql", "postgres", "postgresql+psycopg")


def _parse(url: str) -> tuple[sa.URL, str | None]:
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError) as error:
        raise LogError(
            f"{without_password(url)!r} is not a database URL; one is sqlite:////path/log.db"
        ) from error
    if parsed.drivername not in _SCHEMES:
        raise LogError(
            f"log {_name(parsed)}: its database driver is not installed; a log is in SQLite, or by the "
            "driver psycopg in Postgres: postgresql://user@host/database"
        )
    blobs = parsed.query.get(_BLOBS)
    if isinstance(blobs, tuple) or blobs == "":
        raise LogError(f"log {_name(parsed)}: ?{_BLOBS}= names one folder or bucket")
    backend = "sqlite" if parsed.drivername == "sqlite" else "postgresql"
    return parsed.difference_update_query([_BLOBS]).set(drivername=backend), blobs


def _engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() == "postgresql":
        return postgres.engine_of(url, _name(url))
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_SECONDS}, max_overflow=-1)
    sa.event.listen(engine, "connect", _on_connect)
    sa.event.listen(engine, "begin", _on_begin)
    return engine


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


def _check_file(database: Database, create: bool) -> None:
    if not database.is_sqlite:
        return
    path, folder = Path(database.name), database.folder
    if not path.exists():
        if not create:
            raise LogError(f"there is no log at {path}; run a task first, or name another log")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LogError(f"log {path}: cannot make its folder ({error.strerror}); {_ELSEWHERE}") from error
    for needed in (folder, path) if path.exists() else (folder,):
        if not os.access(needed, os.W_OK):
            raise LogError(f"log {path}: {needed} is not writable for this user; {_ELSEWHERE}")


_ELSEWHERE = "change its permissions, or keep the log elsewhere (NANO_HOME)"


def _check_revision(database: Database, create: bool) -> None:
    revision = _revision(database)
    if revision == HEAD:
        return
    if revision is None and not create:
        raise LogError(f"log {database.name} is empty; run a task first, or name another log")
    if revision is not None and revision > HEAD:
        raise LogError(
            f"log {database.name} was written by a newer nano (schema {revision}, this one knows {HEAD}); "
            "upgrade nano, or name another log"
        )
    if not database.is_sqlite:
        return database.write(_upgrade_alone)
    locks = database.folder / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / "migrate.lock"):
        if _revision(database) != HEAD:
            _upgrade(database)


def _upgrade_alone(connection: sa.Connection) -> None:
    """Migrate a server's database, unless another process has done so by the time that this one may."""
    postgres.lock_migrations(connection)
    if _revision_of(connection) != HEAD:
        migrate(connection)


def _revision(database: Database) -> str | None:
    """The schema's revision; None for a database without tables. Raises LogError for a foreign database."""
    with database.engine.connect() as connection:
        tables = sa.inspect(connection).get_table_names()
        revision = _revision_of(connection, tables)
    if revision is None and tables:
        raise LogError(
            f"log {database.name} is some other program's database (it has tables {', '.join(tables[:3])}"
            f"{', ...' if len(tables) > 3 else ''}); name another"
        )
    return revision


def _revision_of(connection: sa.Connection, tables: Sequence[str] | None = None) -> str | None:
    # in one query: tables that another process commits a moment later are all missing, or all there
    if VERSION_TABLE not in (sa.inspect(connection).get_table_names() if tables is None else tables):
        return None
    revision = connection.scalar(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return None if revision is None else str(revision)


def _upgrade(database: Database) -> None:
    # the mode is persistent, and cannot be changed inside a transaction
    with database.engine.connect() as connection:
        connection.connection.driver_connection.execute("PRAGMA journal_mode=WAL")  # type: ignore[union-attr]
    database.engine.dispose()  # connections read the mode when they are made
    database.write(migrate)


def _is_locked(error: BaseException) -> bool:
    return isinstance(error, SQLAlchemyError) and "database is locked" in str(error)


def _name(url: sa.URL) -> str:
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    if "password" in url.query:
        url = url.update_query_dict({"password": "***"})
    return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
