"""Runs inside the jail, as a plugin of pytest: writes which functions of the workspace each test calls.

Standard library and pytest only: the text of this file is put into the workspace. One JSON line a test:
{"test": its id, "passed": whether it passed, "seconds": of its call, "calls": [[file, first line], ...],
"returns": [[file, first line, "arguments as written in a call", "what it returned"], ...]}, the last for a
few calls with plain values.
"""

from __future__ import annotations

import contextlib
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
PLAIN = (int, float, str, bool, bytes, type(None))
MOST_RETURNS, LONGEST = 3, 200
"""calls of one function that are kept of one test, and characters of their arguments and result"""
UNSUITABLE = 0x04 | 0x08 | 0x20 | 0x80 | 0x200
"""flags of code with *args, **kwargs, or of a generator or coroutine"""


def written(value: Any) -> str:
    """A plain value as Python writes it. Raises ValueError for any other, and for one that is long."""

    def plain(part: Any) -> bool:
        if type(part) is dict:
            return all(plain(k) and plain(v) for k, v in part.items())
        return type(part) in PLAIN or (type(part) in (list, tuple) and all(map(plain, part)))

    if not plain(value) or len(text := repr(value)) > LONGEST:
        raise ValueError
    return text


def arguments(frame: Any) -> str:
    """The arguments of a call that begins, as they would be written. Raises ValueError for others than
    plain ones."""
    code = frame.f_code
    if code.co_flags & UNSUITABLE:
        raise ValueError
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    texts = [written(frame.f_locals[name]) for name in names]
    keyed = [f"{name}=" if n >= code.co_argcount else "" for n, name in enumerate(names)]
    return ", ".join(key + text for key, text in zip(keyed, texts, strict=True))


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
    returns: dict[Any, dict[str, str]] = {}

    def trace(frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        codes.add(code)
        if own_file(code) is None:
            return None
        kept = returns.setdefault(code, {})
        try:
            call = arguments(frame) if len(kept) < MOST_RETURNS else None
        except (ValueError, KeyError, RecursionError):
            return None
        raised = False

        def until_return(frame: Any, event: str, arg: Any) -> Any:
            nonlocal raised
            raised = raised or event == "exception"
            if event == "return" and not raised:
                with contextlib.suppress(ValueError, RecursionError):
                    kept[call] = written(arg)
            return until_return

        frame.f_trace_lines = False
        return until_return if call is not None else None

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
    row["returns"] = [
        [own_file(code), code.co_firstlineno, call, result]
        for code, kept in returns.items()
        for call, result in kept.items()
    ]
    FOUND.write(json.dumps(row) + "\n")


def pytest_runtest_logreport(report: Any) -> None:
    passed, seconds = outcomes.get(report.nodeid, (True, 0.0))
    fine = report.passed and not hasattr(report, "wasxfail")
    outcomes[report.nodeid] = (passed and fine, seconds + report.duration)
