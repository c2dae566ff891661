"""Runs inside the jail, as a plugin of pytest: writes which functions of the workspace each test calls.

Standard library and pytest only: the text of this file is put into the workspace. One JSON line a test:
{"test": its id, "passed": whether it passed, "seconds": of its call, "calls": [[file, first line], ...]}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import pytest

ROOT = os.getcwd() + os.sep
FOUND = open(os.environ["NANO_CALLS"], "a", encoding="utf-8", buffering=1)  # noqa: SIM115
outcomes: dict[str, tuple[bool, float]] = {}


def own_file(code: Any) -> str | None:
    """The file of the workspace that code is from; None for other code, and for this file's."""
    path = os.path.join(ROOT, code.co_filename)
    mine = code.co_filename.startswith("<") or path == os.path.abspath(__file__)
    return None if mine or not path.startswith(ROOT) else path[len(ROOT) :]


def too_slow(signum: int, frame: Any) -> None:
    raise TimeoutError("the test takes too long to be used")


signal.signal(signal.SIGALRM, too_slow)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any, nextitem: Any) -> Any:
    codes: set[Any] = set()

    def trace(frame: Any, event: str, arg: Any) -> None:
        codes.add(frame.f_code)

    threading.settrace(trace)
    sys.settrace(trace)
    signal.setitimer(signal.ITIMER_REAL, float(os.environ["NANO_SLOWEST"]))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    passed, seconds = outcomes.pop(item.nodeid, (False, 0.0))
    calls = sorted({(path, code.co_firstlineno) for code in codes if (path := own_file(code)) is not None})
    row = {"test": item.nodeid, "passed": passed, "seconds": float(round(seconds, 4)), "calls": calls}
    FOUND.write(json.dumps(row) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    passed, seconds = outcomes.get(report.nodeid, (True, 0.0))
    fine = report.passed and not hasattr(report, "wasxfail")
    outcomes[report.nodeid] = (passed and fine, seconds + report.duration)
