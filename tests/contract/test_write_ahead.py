"""A write that has returned is on disk, and writers that come together share one flush."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from log_values import a_run, a_turn

from nano_shared import database as write_ahead
from nano_shared.database import WriteAhead
from nano_shared.errors import LogError
from nano_shared.store import LogStore


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were flushed, in order."""
    paths: list[Path] = []
    real = write_ahead._flush

    def flush(path: Path) -> None:
        real(path)
        paths.append(path)

    monkeypatch.setattr(write_ahead, "_flush", flush)
    return paths


def test_every_write_is_flushed_before_it_returns(tmp_path: Path, flushed: list[Path]) -> None:
    log = tmp_path / "log.db"
    with LogStore.open(log) as store:
        store.begin(a_run())
        for index in range(3):
            before = len(flushed)
            store.append_turn("run1", a_turn(index))
            assert flushed[before:] == [tmp_path / "log.db-wal"]
        with store.database.engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1  # NORMAL
    with closing(sqlite3.connect(log)) as connection:
        assert connection.execute("SELECT count(*) FROM log_turns").fetchone() == (3,)


def test_a_refused_write_waits_for_no_disk(tmp_path: Path, flushed: list[Path]) -> None:
    with LogStore.open(tmp_path / "log.db") as store:
        store.begin(a_run())
        before = len(flushed)
        with pytest.raises(LogError, match="cannot be its next"):
            store.append_turn("run1", a_turn(7))
        assert flushed[before:] == []


def test_commits_that_wait_together_are_flushed_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, calls = WriteAhead(tmp_path / "log.db"), 0
    first_is_in, go_on = threading.Event(), threading.Event()

    def flush(path: Path) -> None:
        nonlocal calls
        calls += 1
        first_is_in.set()
        go_on.wait()

    monkeypatch.setattr(write_ahead, "_flush", flush)
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(ahead.flush)
        first_is_in.wait()
        others = [pool.submit(ahead.flush) for _ in range(8)]
        while ahead._committed < 9:
            time.sleep(0.001)
        assert not any(other.done() for other in others)  # the flush that runs began before their commits
        go_on.set()
        for done in (first, *others):
            done.result()
    assert calls == 2


def test_a_disk_that_is_full_at_the_flush_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with LogStore.open(tmp_path / "log.db") as store:
        monkeypatch.setattr(write_ahead, "_flush", full)
        with pytest.raises(LogError, match=r"no space left while writing .*log\.db.*NANO_HOME"):
            store.begin(a_run())
