"""Which tests are collected for whom, and what no test need do again: search what imports made, read
certificates, migrate an empty log."""

from __future__ import annotations

import functools
import gc
import os
import ssl

import empty_log  # noqa: F401
import pytest
from hypothesis import settings

gc.disable()
ssl.create_default_context = functools.cache(ssl.create_default_context)  # 20 ms for each client of httpx
DRAWN = 12
"""examples of a property under `make test`, whose profile draws the same each time"""


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
    test, some = getattr(item, "obj", None), item.get_closest_marker("some")
    most = some.args[0] if some else DRAWN
    if (own := getattr(test, "_hypothesis_internal_use_settings", None)) and own.max_examples > most:
        test._hypothesis_internal_use_settings = settings(own, max_examples=most)  # type: ignore[union-attr]


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
