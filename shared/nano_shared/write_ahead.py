"""What a commit of SQLite still owes the disk: the flush of its write-ahead log, shared by many writers."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path


class WriteAhead:
    """The write-ahead log of one SQLite file.

    With synchronous=FULL a commit flushes it while it holds the lock, so that writers wait for the disk one
    after the other. With NORMAL the file is always consistent, but the last commits are lost by a power cut.
    Here a commit is made under NORMAL, and its caller goes on only after `flush`, outside of the lock: the
    commits that other threads and processes made meanwhile reach the disk together with it.
    """

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + "-wal")
        self._flushing = threading.Lock()
        self._counting = threading.Lock()
        self._committed = self._flushed = 0

    def flush(self) -> None:
        """Return once what this thread has committed is on disk. Raises OSError where the disk refuses."""
        with self._counting:
            self._committed += 1
            mine = self._committed
        with self._flushing:
            if self._flushed >= mine:
                return
            with self._counting:
                reached = self._committed
            # No file: the last connection has put it into the database, which is flushed with it.
            with suppress(FileNotFoundError):
                _flush(self._path)
            self._flushed = reached


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)
