"""An empty log is migrated once a process; every other one is a copy of its file."""

from __future__ import annotations

import functools
import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from nano_shared import database

_upgrade = database.Database.upgrade


@functools.cache
def empty_log() -> bytes:
    """The file of a log that was migrated and holds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.db"
        made = database._connect(path)
        _upgrade(made)
        made.close()
        with closing(sqlite3.connect(path)) as connection:  # all of it into this file
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return path.read_bytes()


def _made(log: database.Database) -> None:
    """As `_upgrade`; the tests of the log itself migrate."""
    path = Path(log.name)
    if "contract/" in os.environ.get("PYTEST_CURRENT_TEST", "") or (path.exists() and path.stat().st_size):
        return _upgrade(log)
    log.engine.dispose()  # which may hold the empty file open
    path.write_bytes(empty_log())
    return None


database.Database.upgrade = _made  # type: ignore[method-assign]
