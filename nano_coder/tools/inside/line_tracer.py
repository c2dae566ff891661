"""Runs inside the jail, in every Python process of a check: records the project's lines that each test runs.

Standard library only. `sitecustomize` imports it, and pytest loads it as a plugin; tests of unittest are
recognised too. A process that runs neither is one test of its own. At its end each process writes
$NANO_LINES/PID.json:

    {"files": [path, ...],
     "tests": {id: {"lines": [[file, line], ...], "failed": bool, "frames": [[path, line], ...],
                    "said": text}}}

`frames` are those of the project in the traceback of a failure, outermost first; `said` is its exception. The
lines that ran before or
between tests have the id "". PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import traceback
from typing import Any

FOLDER, ROOT = os.environ["NANO_LINES"], os.environ["NANO_LINES_ROOT"]
ONLY = os.environ.get("NANO_LINES_ONLY")
"""a file with the tests that pytest runs, where nothing is traced"""
MOST_TESTS = 4000
"""tests whose lines are kept; further passing ones are not"""
MOST_SAID = 4000
"""characters of an exception that are kept"""
_LEFT_OUT = (".venv", "venv", "site-packages", ".tox", ".nox", "node_modules", ".nano")

tests: dict[str, dict[str, Any]] = {}
_files: dict[str, int] = {}
_known: dict[int, tuple[Any, int]] = {}
"""id of a code object -> it, kept alive, and the index of its file; -1 for code that is not the project's"""
_now: set[tuple[int, int]] = set()
_entered: dict[int, Any] = {}
"""id of a code object that ran in the test at hand -> what traces its lines; None for code that is not the
project's, and where all lines were seen"""


def project_path(filename: str) -> str | None:
    """The path of a file of the project from its root; None for any other file."""
    path = os.path.abspath(os.path.join(ROOT, filename))
    if filename.startswith("<") or not path.startswith(ROOT + os.sep):
        return None
    inner = path[len(ROOT) + 1 :]
    return None if any(part in _LEFT_OUT for part in inner.split(os.sep)) else inner


def file_of(code: Any) -> int:
    """The index of the project's file that code is from; -1 for other code."""
    known = _known.get(id(code))
    if known is None:
        path = project_path(code.co_filename)
        known = _known[id(code)] = code, -1 if path is None else _files.setdefault(path, len(_files))
    return known[1]


def entered(frame: Any, event: str, arg: Any) -> Any:
    """The trace function of a call, up to Python 3.11."""
    code = frame.f_code
    try:
        return _entered[id(code)]
    except KeyError:
        file = file_of(code)
        found = _entered[id(code)] = None if file < 0 else tracer_of(code, file, _now)
        return found


def tracer_of(code: Any, file: int, now: set[tuple[int, int]]) -> Any:
    """Adds the lines of the code to those of a test, until they are all there."""
    left = {number for _, _, number in code.co_lines() if number}

    def line(frame: Any, event: str, arg: Any) -> Any:
        if now is not _now:  # the call has outlived its test
            frame.f_trace = entered(frame, event, arg)
            return frame.f_trace and frame.f_trace(frame, event, arg)
        if (number := frame.f_lineno) in left:
            now.add((file, number))
            left.discard(number)
            if left <= {code.co_firstlineno}:
                _entered[id(code)] = None
        return line

    return line


def start_tracing() -> None:
    if sys.version_info < (3, 12):
        threading.settrace(entered)
        sys.settrace(entered)
        return
    monitoring = sys.monitoring
    tool = next((n for n in (1, 3, 4, 5) if monitoring.get_tool(n) is None), None)
    if tool is None:
        return
    monitoring.use_tool_id(tool, "nano")

    def ran(code: Any, line: int) -> Any:
        file = file_of(code)
        if file >= 0:
            _now.add((file, line))
        return monitoring.DISABLE  # until the next test

    monitoring.register_callback(tool, monitoring.events.LINE, ran)
    monitoring.set_events(tool, monitoring.events.LINE)


def begin(test: str) -> None:
    """From here on lines are those of this test."""
    global _now
    found = tests.setdefault(test, {"lines": set(), "failed": False, "frames": [], "said": ""})
    _now = found["lines"]
    _entered.clear()
    if sys.version_info >= (3, 12):
        sys.monitoring.restart_events()
    elif test and not ONLY and sys.gettrace() is not entered:  # a coverage measurement of the project's own
        sys.settrace(entered)


def end(test: str) -> None:
    begin("")
    if len(tests) > MOST_TESTS and not tests[test]["failed"]:
        del tests[test]


def fail(test: str, trace: Any, said: str = "") -> None:
    """Note a failure; `trace` is the traceback of its exception, None if there is none, and `said` its
    text."""
    found = tests.setdefault(test, {"lines": set(), "failed": True, "frames": [], "said": ""})
    found["failed"], found["said"] = True, found["said"] or said[:MOST_SAID]
    while trace is not None:
        path = project_path(trace.tb_frame.f_code.co_filename)
        if path is not None:
            found["frames"].append([path, trace.tb_lineno])
        trace = trace.tb_next


def write() -> None:
    sys.settrace(None)
    done = {
        name: found | {"lines": sorted(found["lines"])}
        for name, found in tests.items()
        if found["lines"] or found["failed"]
    }
    with open(os.path.join(FOLDER, f"{os.getpid()}.json.new"), "w", encoding="utf-8") as file:
        json.dump({"files": list(_files), "tests": done}, file)
    os.replace(file.name, file.name[: -len(".new")])


# pytest


def pytest_configure(config: Any) -> None:
    config.option.maxfail = 0  # the tests behind the first failure tell what is right
    if sys.version_info < (3, 12):
        sys.settrace(None)  # between the tests it would see pytest at work, in millions of calls


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if ONLY:
        with open(ONLY, encoding="utf-8") as file:
            chosen = set(json.load(file))
        items[:] = [item for item in items if item.nodeid in chosen]


def while_traced(item: Any) -> Any:
    """A hook around the setup, the body and the teardown of a test."""
    if sys.version_info < (3, 12) and not ONLY:
        sys.settrace(entered)
    yield
    if sys.version_info < (3, 12):
        sys.settrace(None)


while_traced.pytest_impl = {"hookwrapper": True, "trylast": True}  # type: ignore[attr-defined]
pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = while_traced


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    begin(nodeid)


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    if nodeid in tests:
        end(nodeid)


def pytest_exception_interact(node: Any, call: Any, report: Any) -> None:
    if call.excinfo:
        fail(node.nodeid, call.excinfo.tb, call.excinfo.exconly(tryshort=True))
    else:
        fail(node.nodeid, None)


# unittest


def watch_unittest() -> None:
    """Make every run of a TestCase a test, unless pytest runs it."""
    from unittest import case, result

    run, add_error, add_failure = case.TestCase.run, result.TestResult.addError, result.TestResult.addFailure

    def watched(self: Any, result: Any = None) -> Any:
        if "pytest" in sys.modules:
            return run(self, result)
        begin(self.id())
        try:
            return run(self, result)
        finally:
            end(self.id())

    def noting(original: Any) -> Any:
        def add(self: Any, test: Any, problem: Any) -> None:
            said = "".join(traceback.format_exception_only(*problem[:2]))
            fail(getattr(test, "test_case", test).id(), problem[2], said)
            original(self, test, problem)

        return add

    case.TestCase.run = watched  # type: ignore[method-assign]
    result.TestResult.addError = noting(add_error)  # type: ignore[method-assign]
    result.TestResult.addFailure = noting(add_failure)  # type: ignore[method-assign]


def last_words(kind: Any, problem: Any, trace: Any) -> None:
    """The hook of an exception that ends the process."""
    fail("", trace, "".join(traceback.format_exception_only(kind, problem)))
    sys.__excepthook__(kind, problem, trace)


# a process that a test starts belongs to the test
begin(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
sys.excepthook = last_words
atexit.register(write)
watch_unittest()
if not ONLY:
    start_tracing()
