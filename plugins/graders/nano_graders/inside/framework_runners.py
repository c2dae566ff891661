"""Runs test files with the framework that they were written for; checks are announced, then reported.

A check that its own decorator skips is not announced; one that is skipped while running is an error.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

Announce = Callable[[list[str]], None]
ReportCheck = Callable[[str, str], None]
"""called with name and pass | fail | error"""


def run_script(
    tests: dict[str, str], module: types.ModuleType, announce: Announce, check: ReportCheck
) -> None:
    """Run statements in order; every top-level assert is a check, and so is reaching the end."""
    names = script_checks(tests)
    announce([name for file in tests for name in names[file]])
    for file, text in tests.items():
        _run_script(file, text, check, set(names[file]))


def script_checks(tests: dict[str, str]) -> dict[str, list[str]]:
    """File -> its checks; the last one is reaching the end."""
    return {
        file: [f"{file}:{n.lineno}" for n in ast.parse(text).body if isinstance(n, ast.Assert)] + [file]
        for file, text in tests.items()
    }


def _run_script(file: str, text: str, check: ReportCheck, names: set[str]) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(file)
    sys.modules["__main__"] = main
    tree = ast.parse(text, file)
    future = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    left = set(names)
    state = "pass"
    for node in tree.body:
        name = f"{file}:{node.lineno}" if isinstance(node, ast.Assert) else file
        body: list[ast.stmt] = [*future, node] if node not in future else [node]
        code = compile(ast.Module(body=body, type_ignores=[]), file, "exec", dont_inherit=True)
        try:
            exec(code, vars(main))
        except BaseException as error:
            verdict = "fail" if isinstance(error, AssertionError) else "error"
        else:
            verdict = "pass"
        if name != file:
            left.discard(name)
            check(name, verdict)
        elif verdict != "pass":
            state = verdict
            break
    for name in sorted(left - {file}):
        check(name, "error")
    check(file, state)


def run_doctest(
    tests: dict[str, str], module: types.ModuleType, announce: Announce, check: ReportCheck
) -> None:
    """Every example of every text is a check; the examples of a text share its names."""
    import doctest

    class Reporter(doctest.DocTestRunner):
        def say(self, test: Any, example: Any, state: str) -> None:
            check(f"{test.name}:{example.lineno + 1}", state)

        def report_start(self, out: Any, test: Any, example: Any) -> None:
            """Prints nothing before an example."""

        def report_success(self, out: Any, test: Any, example: Any, got: str) -> None:
            self.say(test, example, "pass")

        def report_failure(self, out: Any, test: Any, example: Any, got: str) -> None:
            self.say(test, example, "fail")

        def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
            self.say(test, example, "error")

    parsed = [
        doctest.DocTestParser().get_doctest(text, dict(vars(module)), file, file, 0)
        for file, text in tests.items()
    ]
    announce([f"{test.name}:{example.lineno + 1}" for test in parsed for example in test.examples])
    for test in parsed:
        Reporter(verbose=False).run(test, out=lambda _: None, clear_globs=False)


def run_unittest(
    tests: dict[str, str], module: types.ModuleType, announce: Announce, check: ReportCheck
) -> None:
    import unittest

    count_every_end()
    loader = unittest.TestLoader()
    suite = unittest.TestSuite()
    for file in tests:
        suite.addTests(loader.loadTestsFromModule(_imported(file)))
    cases = list(_cases(suite))
    announce([case.id() for case in cases if not _skipped_by_its_author(case)])

    class Result(unittest.TestResult):
        def startTest(self, test: Any) -> None:
            super().startTest(test)
            self.state = "error"
            self.subtest = "pass"

        def addSuccess(self, test: Any) -> None:
            self.state = self.subtest

        def addFailure(self, test: Any, err: Any) -> None:
            self.state = "fail"

        def addError(self, test: Any, err: Any) -> None:
            self.state = "error"

        def addSkip(self, test: Any, reason: str) -> None:
            self.state = "error"

        def addExpectedFailure(self, test: Any, err: Any) -> None:
            self.state = "pass"

        def addUnexpectedSuccess(self, test: Any) -> None:
            self.state = "fail"

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
            if err is not None:
                self.subtest = self.state = "fail" if issubclass(err[0], test.failureException) else "error"

        def stopTest(self, test: Any) -> None:
            super().stopTest(test)
            if not _skipped_by_its_author(test):
                check(test.id(), self.state)

    suite.run(Result())


def count_every_end() -> None:
    """Count tests as failed that unittest's own control-flow exceptions would end silently."""
    import unittest.case

    parts: Any = unittest.case._Outcome  # type: ignore[attr-defined]
    stop: Any = unittest.case._ShouldStop  # type: ignore[attr-defined]
    original = parts.testPartExecutor
    if original.__module__ == __name__:
        return

    @contextlib.contextmanager
    def counted(self: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        with original(self, *args, **kwargs):
            try:
                yield
            except stop as error:
                if self.expectedFailure is None:  # otherwise a part of it failed, as was expected
                    raise RuntimeError("left by an exception of the test runner's") from error
                raise

    counted.__module__ = __name__
    parts.testPartExecutor = counted


def _cases(suite: Any) -> Any:
    for part in suite:
        if hasattr(part, "__iter__"):
            yield from _cases(part)
        else:
            yield part


def _skipped_by_its_author(case: Any) -> bool:
    method = getattr(case, getattr(case, "_testMethodName", ""), None)
    return bool(getattr(case, "__unittest_skip__", False) or getattr(method, "__unittest_skip__", False))


def _imported(file: str) -> types.ModuleType:
    name = os.path.basename(file).removesuffix(".py")
    spec: Any = importlib.util.spec_from_file_location(name, os.path.abspath(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_pytest(
    tests: dict[str, str], module: types.ModuleType, announce: Announce, check: ReportCheck
) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    import asyncio
    import inspect

    import pytest

    count_every_end()

    class Recorder:
        def __init__(self) -> None:
            self.states: dict[str, str] = {}
            self.skipped: set[str] = set()

            self.expected: set[str] = set()

        @pytest.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
        def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool | None:
            """Runs an asynchronous test in a new event loop; no plugin is there to do it."""
            if not inspect.iscoroutinefunction(pyfuncitem.obj):
                return None
            wanted = pyfuncitem._fixtureinfo.argnames
            asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
            return True

        def pytest_collection_finish(self, session: Any) -> None:
            self.expected = {item.nodeid for item in session.items if item.get_closest_marker("xfail")}
            self.skipped = {
                item.nodeid
                for item in session.items
                if item.get_closest_marker("skip") or _skipped_by_its_author(_unittest_case(item))
            }
            announce([item.nodeid for item in session.items if item.nodeid not in self.skipped])

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.nodeid in self.skipped:
                return
            xfailed = hasattr(report, "wasxfail") and report.nodeid in self.expected
            if report.failed:
                self.states[report.nodeid] = "fail" if report.when == "call" else "error"
            elif not (report.passed or xfailed):
                self.states[report.nodeid] = "error"
            elif report.when == "call" or xfailed:
                self.states.setdefault(report.nodeid, "pass")
            if report.when == "teardown":
                check(report.nodeid, self.states.get(report.nodeid, "error"))

    files = [file for file in tests if _has_tests(tests[file])]
    options = [
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        os.getcwd(),
        "--confcutdir",
        os.getcwd(),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
    ]
    pytest.main([*options, *files], plugins=[Recorder()])


def _unittest_case(item: Any) -> Any:
    kind = getattr(item, "cls", None)
    return types.SimpleNamespace(
        __unittest_skip__=getattr(kind, "__unittest_skip__", False)
        or getattr(getattr(item, "obj", None), "__unittest_skip__", False)
    )


def _has_tests(text: str) -> bool:
    return any(
        isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test")
        for n in ast.walk(ast.parse(text))
    )


RUNNERS: dict[str, Callable[[dict[str, str], types.ModuleType, Announce, ReportCheck], None]] = {
    "script": run_script,
    "doctest": run_doctest,
    "unittest": run_unittest,
    "pytest": run_pytest,
}
