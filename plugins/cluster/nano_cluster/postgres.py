"""The log on Postgres: connections, writes that happen once, claims of runs, and queries of users."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError, SQLAlchemyError
from tenacity import Retrying, retry_if_exception, retry_if_result, stop_after_delay, wait_random_exponential

from nano_shared.database import Database, migrate, revision_of, shown_url
from nano_shared.errors import ConfigError, LogError
from nano_shared.files import nano_home
from nano_shared.schema import HEAD

T = TypeVar("T")

OUTAGE_SECONDS = 30
"""a write or read waits as long for a server that restarts"""
_LOCK_SECONDS, _STATEMENT_SECONDS = 30, 600
_SESSION = f"-c lock_timeout={_LOCK_SECONDS}s -c statement_timeout={_STATEMENT_SECONDS}s"
# a host that vanishes must not hang a writer for the hours that TCP allows
_CONNECTION = {
    "connect_timeout": "10", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "tcp_user_timeout": "60000", "client_encoding": "utf8",
}  # fmt: skip
_UNASKED_SECONDS = 1.0
_CONCURRENT = 32
"""connections of one process, those of claims not counted"""

_LOST = frozenset({"57P01", "57P02", "57P03"})  # the server shuts down, crashed, or starts
_REPEATABLE = _LOST | {"40001", "40P01", "53300"}  # serialization, deadlock, too many connections

_BY_STATE = {
    "25006": "the server takes no writes: it is a standby, or set read-only; name the primary",
    "42501": "the role lacks a right ({cause}); let the owner of the database GRANT it",
    "53100": "the server's disk is full ({cause}); free some space there",
    "53300": "the server has no connection left; raise its max_connections, or run fewer workers",
    "55P03": f"another process held it for over {_LOCK_SECONDS} s; try again when that is done",
    "57014": f"a statement ran for over {_STATEMENT_SECONDS} s and was cancelled",
}
_BY_SYMPTOM = {
    "no password supplied": "the server asks for a password; write it in the URL, or in ~/.pgpass",
    "authentication failed": "the server refused the role or its password ({cause})",
    'database "': "{cause}; make it with `createdb`",
    'role "': "{cause}; make it with `createuser`",
    "too many clients": _BY_STATE["53300"],
    "remaining connection slots": _BY_STATE["53300"],
}


class PostgresDatabase(Database):
    """The log on a server, for several machines."""

    views: ClassVar[dict[str, Any]] = {"isolation_level": "REPEATABLE READ"}

    def __init__(self, url: sa.URL, blobs: str | None) -> None:
        super().__init__(engine_of(url, shown_url(url)), blobs)
        self._claims = Claims(self.engine)
        self._retrying = retrying()

    @property
    def address(self) -> str:
        url = self.engine.url.set(drivername=self.engine.dialect.name)
        return self.with_blobs(url).render_as_string(False)

    @property
    def folder(self) -> Path:
        return nano_home()

    def stamp(self) -> None:
        return None

    def prepare(self, create: bool) -> None:
        # a server that shuts down or starts says so; of one that is not there the user is told at once
        opening = self._retrying.copy(retry=retry_if_exception(lambda e: _is_repeatable(e) and _state(e)))
        if opening(self.is_outdated, create):
            self.write(_upgrade_alone)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        with self.explained():
            found: T = self._retrying(self.read_once, work)
            return found

    def write(self, work: Callable[[sa.Connection], T]) -> T:
        with self.explained():
            result: T = self._retrying(self.write_once, work)
            self._claims.renew()
            return result

    def write_once(self, work: Callable[[sa.Connection], T]) -> T:
        with self.engine.connect() as connection:
            return write_once(self.engine, connection, work)

    def query(self, sql: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        if ";" in sql.strip().rstrip(";"):  # a second statement could end the read-only transaction
            raise LogError(f"log {self.name}: one statement at a time, without ';'; the query was: {sql}")
        return user_query(self.engine, self.name, sql)

    def claim(self, run_id: str) -> AbstractContextManager[None]:
        return self._claims.hold(run_id)

    def overwrite_deleted(self) -> None:
        """What a server kept in its backups is not ours to overwrite."""

    def explanation(self, error: DBAPIError) -> str | None:
        return explanation(error)

    def close(self) -> None:
        self._claims.close()
        super().close()


def _upgrade_alone(connection: sa.Connection) -> None:
    """Migrate a server's database, unless another process has done so by the time that this one may."""
    lock_migrations(connection)
    if revision_of(connection) != HEAD:
        migrate(connection)


_RELEASED = "a process that has ended"


def application_name() -> str:
    """How the server lists this process."""
    return f"{_our_processes()}{os.getpid()}"


def _our_processes() -> str:
    return f"nano {socket.gethostname()[:32]} pid "


def _has_ended(owner: str) -> bool:
    """Whether `owner`, an application_name, is a process of this machine that is no more."""
    pid = owner.removeprefix(_our_processes())
    return owner == _RELEASED or (pid != owner and pid.isdigit() and not os.path.exists(f"/proc/{pid}"))


def engine_of(url: sa.URL, name: str) -> sa.Engine:
    """An engine with time-outs; what the URL says of them goes first. Raises ConfigError without psycopg."""
    arguments = _CONNECTION | {"application_name": application_name()}
    given = {key for key in arguments if key in url.query}
    options = " ".join((_SESSION, *_texts(url.query.get("options"))))
    try:
        engine = sa.create_engine(
            url.set(drivername="postgresql+psycopg"),
            connect_args={k: v for k, v in arguments.items() if k not in given} | {"options": options},
            max_overflow=_CONCURRENT - 5,
        )  # fmt: skip
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"log {name}: Postgres needs psycopg ({error}); pip install 'nano-rl-coder[postgres]'"
        ) from error
    sa.event.listen(engine, "checkin", _note_return)
    sa.event.listen(engine, "checkout", _refuse_dropped)
    return engine


def _note_return(_driver: Any, record: sa.pool.ConnectionPoolEntry) -> None:
    record.info["returned"] = time.monotonic()


def _refuse_dropped(driver: Any, record: sa.pool.ConnectionPoolEntry, _proxy: object) -> None:
    """Have the pool make a connection anew that the server has dropped. One that was used a moment ago is not
    asked, as `pool_pre_ping` would before every write: what breaks in that moment is repeated."""
    if time.monotonic() - record.info.get("returned", math.inf) < _UNASKED_SECONDS:
        return
    import psycopg

    try:
        driver.execute("")
        driver.rollback()
    except psycopg.Error as error:
        raise sa.exc.DisconnectionError(str(error)) from error


def _texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def explanation(error: DBAPIError) -> str | None:
    """What happened and the way out; None for an error that is none of the server's or its user's."""
    cause = " ".join(str(error.orig).split())
    found = _BY_STATE.get(_state(error))
    if found is None and isinstance(error, OperationalError):
        found = next((text for symptom, text in _BY_SYMPTOM.items() if symptom in cause.lower()), "{cause}")
    return found and found.format(cause=cause)


def _state(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


def _is_lost(error: BaseException) -> bool:
    """Whether the connection broke or could not be made, so that nobody knows what the server did."""
    if not isinstance(error, DBAPIError):
        return False
    state = _state(error)
    unnamed = isinstance(error, OperationalError) and not state
    return error.connection_invalidated or unnamed or state in _LOST or state.startswith("08")


def _is_repeatable(error: BaseException) -> bool:
    return _is_lost(error) or (isinstance(error, DBAPIError) and _state(error) in _REPEATABLE)


def retrying() -> Retrying:
    """Repeats what a restart of the server, a broken connection or a deadlock ended."""
    return Retrying(
        retry=retry_if_exception(_is_repeatable), stop=stop_after_delay(OUTAGE_SECONDS),
        wait=wait_random_exponential(multiplier=0.1, max=2), reraise=True,
    )  # fmt: skip


_NUMBER = "SELECT CAST(pg_current_xact_id_if_assigned() AS text)"


def write_once(engine: sa.Engine, connection: sa.Connection, work: Callable[[sa.Connection], T]) -> T:
    """Run `work` in one transaction. Raises DBAPIError only where nothing of it was written. A connection
    that breaks during the commit leaves its fate open: the server is asked by the number of the
    transaction."""
    number: str | None = None
    try:
        with connection.begin():
            result = work(connection)
            number = connection.exec_driver_sql(_NUMBER).scalar()
    except DBAPIError as error:
        if number is None or not _is_lost(error) or not _was_committed(engine, number):
            raise
    return result


def _was_committed(engine: sa.Engine, number: str) -> bool:
    def status() -> str | None:
        with engine.connect() as connection:
            query = sa.text("SELECT pg_xact_status(CAST(:number AS xid8))")
            found = connection.scalar(query, {"number": number})
            return None if found is None else str(found)

    asking = retrying().copy(
        retry=retry_if_exception(_is_lost) | retry_if_result(lambda s: s == "in progress")
    )
    return asking(status) == "committed"


def _key(purpose: str, name: str = "") -> int:
    """A key of an advisory lock, which the server takes as a signed integer of 64 bits."""
    digest = hashlib.blake2b(f"nano {purpose} {name}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "big", signed=True)


def lock_migrations(connection: sa.Connection) -> None:
    """Wait until no other process migrates the database, until the end of the transaction."""
    encoding = connection.scalar(sa.text("SHOW server_encoding"))
    if encoding != "UTF8":
        raise LogError(f"the database has the encoding {encoding}; make one with `createdb --encoding UTF8`")
    connection.execute(sa.text(f"SET LOCAL lock_timeout = '{_STATEMENT_SECONDS}s'"))
    connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_key("migrate"))))


class Claims:
    """The runs that this process executes: advisory locks, which hold across machines, on one connection. The
    server frees them when the process dies. A connection that broke is made anew with the same claims."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._held: dict[str, int] = {}
        self._connection: sa.Connection | None = None
        self._lock = threading.Lock()
        self._suspect = False
        sa.event.listen(engine, "connect", self._on_connect)

    def _on_connect(self, *_event: object) -> None:
        self._suspect = True  # a new connection may be there because the server dropped the old ones

    @contextmanager
    def hold(self, run_id: str) -> Iterator[None]:
        """Raises LogError, on entry, if another process or thread executes the run."""
        key = _key("run", run_id)
        with self._lock:
            owner = application_name() if run_id in self._held else self._take(key)
            if owner is not None:
                raise LogError(
                    f"run {run_id} is being executed by another process ({owner}); "
                    "wait for it, or end that process"
                )
            self._held[run_id] = key
        try:
            yield
        finally:
            with self._lock:
                if self._held.pop(run_id, None) is not None and self._connection is not None:
                    self._release(self._connection, key)

    def renew(self) -> None:
        """Take the claims again if their connection broke. Raises LogError if a run has another owner now."""
        if not (self._suspect and self._held):
            return
        with self._lock:
            self._suspect = False
            retrying()(self._connected)

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _take(self, key: int) -> str | None:
        """Take an advisory lock; returns the application_name of another process that holds it, or None. The
        server frees the lock of a process that was killed only when it notices: until then it is tried
        again."""

        def other_owner() -> str | None:
            if self._connected().scalar(sa.select(sa.func.pg_try_advisory_lock(key))):
                return None
            return self._holder(key)

        waiting = retrying().copy(
            retry=retry_if_exception(_is_repeatable)
            | retry_if_result(lambda owner: owner and _has_ended(owner)),
            retry_error_callback=lambda state: state.outcome and state.outcome.result(),
        )
        return waiting(other_owner)

    def _release(self, connection: sa.Connection, key: int) -> None:
        try:
            connection.execute(sa.select(sa.func.pg_advisory_unlock(key)))
        except SQLAlchemyError:  # a broken connection has released it; any other is released by its end
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection, self._suspect = None, True

    def _connected(self) -> sa.Connection:
        if self._connection is not None:
            try:
                self._connection.execute(sa.select(1))
                return self._connection
            except SQLAlchemyError:
                self._drop()
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # it is none of the pool's: it lives as long as the claims
        with ExitStack() as undo:
            undo.callback(connection.close)
            take = [(run, sa.select(sa.func.pg_try_advisory_lock(key))) for run, key in self._held.items()]
            lost = [run for run, query in take if not connection.scalar(query)]
            undo.pop_all()
        self._connection = connection
        if lost:
            self._held = {run: key for run, key in self._held.items() if run not in lost}
            raise LogError(
                f"run {lost[0]} was taken over by another process while the connection to the log was down"
            )
        return connection

    def _holder(self, key: int) -> str:
        query = sa.text(
            "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid "
            "WHERE l.locktype = 'advisory' AND l.granted AND a.datname = current_database() "
            "AND ((CAST(l.classid AS bigint) << 32) | CAST(l.objid AS bigint)) = :key"
        )
        return str(self._connected().scalar(query, {"key": key}) or _RELEASED)


def copy_rows(
    connection: sa.Connection, table: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]
) -> None:
    """Add rows by COPY in the connection's transaction: several times faster than INSERT."""
    import psycopg

    driver: Any = connection.connection.driver_connection
    names = ", ".join(f'"{column}"' for column in columns)
    try:
        with driver.cursor() as cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
    except psycopg.Error as error:
        kind = OperationalError if isinstance(error, psycopg.OperationalError) else DatabaseError
        raise kind(f"COPY {table}", None, error) from error


_POWERS = ("pg_execute_server_program", "pg_write_server_files", "pg_read_server_files")
_ROLE = " OR ".join(f"pg_has_role(current_user, '{power}', 'MEMBER')" for power in _POWERS)


def user_query(engine: sa.Engine, name: str, query: str) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows of one query in a read-only transaction, on a connection that is closed after it. A
    read-only transaction still runs programs and writes files for a role that may: such a role is refused."""
    options = {"postgresql_readonly": True, "no_parameters": True}
    with engine.connect().execution_options(**options) as connection:
        connection.detach()  # the query may change the session's settings
        role = connection.exec_driver_sql(f"SELECT current_user WHERE {_ROLE}").scalar()
        if role is not None:
            raise LogError(
                f"log {name}: the role {role!r} may run programs or touch files on the server, so that "
                "a query could too; name one in the URL that only reads: CREATE ROLE nano_reader LOGIN "
                "PASSWORD '...'; GRANT pg_read_all_data TO nano_reader"
            )
        result = connection.exec_driver_sql(query)
        if not result.returns_rows:
            return (), []
        return tuple(result.keys()), [tuple(row) for row in result]
