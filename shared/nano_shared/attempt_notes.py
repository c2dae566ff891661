"""Notes of one attempt at a task: in a database in memory, so that no other attempt or project counts.

What the agent is shown of a note is its number and its rank among all that are searched, so that a shared
database would make runs depend on what others write at the same time.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from typing import Any

import sqlalchemy as sa

from nano_shared.database import Database, migrate
from nano_shared.notes import Notes, Scrub

PROJECT = "attempt"
_making = threading.Lock()
"""alembic migrates for one thread at a time"""


@contextmanager
def attempt_notes(scrub: Scrub) -> Iterator[Notes]:
    """An empty store of notes, which is gone at the end."""
    database = _database()
    try:
        with closing(database.engine.raw_connection()) as connection:
            with _making:
                empty = _empty()
            _driver(connection).deserialize(empty)
        yield Notes(database, PROJECT, scrub)
    finally:
        database.close()


def _database() -> Database:
    """One connection in memory, for one thread after another."""
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool, connect_args={"check_same_thread": False})
    sa.event.listen(engine, "connect", _on_connect)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return Database(engine)


def _on_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun by the engine


@cache
def _empty() -> bytes:
    """The bytes of an empty database at the newest revision; migrations take a tenth of a second."""
    database = _database()
    try:
        database.write(migrate)
        with closing(database.engine.raw_connection()) as connection:
            return _driver(connection).serialize()
    finally:
        database.close()


def _driver(connection: Any) -> sqlite3.Connection:
    found: sqlite3.Connection = connection.driver_connection
    return found
