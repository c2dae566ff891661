"""Which tests are collected for whom, and what no test need do again: search what imports made, read
certificates, migrate an empty log."""

from __future__ import annotations

import functools
import gc
import os
import sqlite3
import ssl
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings

from nano_shared import database

gc.disable()
ssl.create_default_context = functools.cache(ssl.create_default_context)  # 20 ms for each client of httpx
DRAWN = 25
"""examples of a property under `make test`, whose profile draws the same each time"""
_upgrade = database.Database.upgrade


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is about another kind of user; make slow the cases that `some` does not keep."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for alike in cases.values():
        count = alike[0].get_closest_marker("some").args[0]  # type: ignore[union-attr]
        kept = {round(n * (len(alike) - 1) / max(count - 1, 1)) for n in range(count)}
        for number, case in enumerate(alike):
            if number not in kept:
                case.add_marker(pytest.mark.slow)
    if config.getoption("--hypothesis-profile") == "ci":
        for item in items:
            _draw_fewer(item)
    other = "as_user" if os.geteuid() == 0 else "as_root"
    if left_out := [item for item in items if item.get_closest_marker(other)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _draw_fewer(item: pytest.Item) -> None:
    test = getattr(item, "obj", None)
    if (own := getattr(test, "_hypothesis_internal_use_settings", None)) and own.max_examples > DRAWN:
        test._hypothesis_internal_use_settings = settings(own, max_examples=DRAWN)  # type: ignore[union-attr]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under NANO_TEST_NO_SKIPS, a skipped test fails the run: what it lacks is to be installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("NANO_TEST_NO_SKIPS") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@functools.cache
def _empty_log() -> bytes:
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
    path.write_bytes(_empty_log())
    return None


database.Database.upgrade = _made  # type: ignore[method-assign]
