"""Runs inside the jail: a check under `line_tracer`, and the ranking of the lines that failing tests run.

Spectrum-based fault localisation: a line's suspicion is Ochiai's coefficient, failed / sqrt(all_failed *
(failed + passed)) of the tests that run it (Abreu, Zoeteweij and van Gemund, 2007). Among equal lines those
of the failures' tracebacks come first, the innermost before its callers, and those that compute more.

Reads {"check", "seconds", "tracer", "most"} as JSON; writes {"exit", "failed", "passed", "output", "lines":
[{"path", "line", "score", "function", "source"}], "functions": [{"path", "function", "first", "last"}],
"places": [{"path", "first", "last", "likely", "source", "failure"}]}. A place is a function that may hold the
bug, or the part of it around its likeliest line; `likely` are its likeliest lines, the first one first;
`failure` is a failing test that runs it, as pytest shows it.
"""

from __future__ import annotations

import ast
import glob
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter, defaultdict
from typing import Any

_SITE = """
import importlib.machinery, importlib.util, os, sys
import nano_lines
_folder = os.path.dirname(os.path.abspath(__file__))
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.abspath(path) != _folder])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
"""
_TESTS = ("tests", "test", "testing", "conftest.py")
_COMPUTES = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.Subscript, ast.Call, ast.IfExp)
_TAIL = 6000
_PLACE = 120
"""lines of a function that are shown whole"""
_AROUND = 8
"""lines that are shown before and after one that is in no function"""
_LIKELY = 5
"""likeliest lines of a place"""
_TEST, _SAID = 40, 12
"""lines of a failing test before its failure, and of the exception"""


def run(
    check: str, seconds: float, tracer: str, only: list[str] | None = None
) -> tuple[int | None, bytes, list[Any]]:
    """The exit code (None: it was stopped), the end of the output, and the reports of the processes. `only`:
    pytest runs these tests alone, and nothing is traced."""
    root = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="nano-lines-", ignore_cleanup_errors=True) as folder:
        for name, text in (("nano_lines.py", tracer), ("sitecustomize.py", _SITE)):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        options = f"-p nano_lines --tb=line {os.environ.get('PYTEST_ADDOPTS', '')}"
        environment = os.environ | {
            "PYTHONPATH": path, "PYTEST_ADDOPTS": options, "PYTHONDONTWRITEBYTECODE": "1",
            "NANO_LINES": folder, "NANO_LINES_ROOT": root,
        }  # fmt: skip
        if only is not None:
            environment["NANO_LINES_ONLY"] = os.path.join(folder, "only")
            with open(environment["NANO_LINES_ONLY"], "w", encoding="utf-8") as file:
                json.dump(only, file)
        line = re.sub(r"\bPYTHONPATH=", f"PYTHONPATH={folder}:", check)  # the check's own comes behind
        with open(os.path.join(folder, "output"), "w+b") as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", line], env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
            code = ended(process, seconds)
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
            said = output.read()
        reports = []
        for name in sorted(glob.glob(os.path.join(folder, "*.json"))):
            with open(name, encoding="utf-8") as report:
                reports.append(json.load(report))
    return code, said, reports


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None if the time was up. An interrupted test run writes what it has seen."""
    for number, patience in ((signal.SIGINT, seconds), (signal.SIGKILL, 5.0)):
        try:
            code = process.wait(patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, number)
        else:
            return code if number is signal.SIGINT else None
    process.wait()
    return None


def merged(reports: list[Any], code: int | None) -> dict[str, dict[str, Any]]:
    """Tests by id: the project's lines that they ran, whether they failed, and frames of the failures."""
    tests: dict[str, dict[str, Any]] = {}
    for report in reports:
        files = report["files"]
        for name, found in report["tests"].items():
            test = tests.setdefault(name, {"lines": set(), "failed": False, "frames": [], "said": ""})
            test["lines"] |= {(files[file], line) for file, line in found["lines"]}
            test["failed"] |= found["failed"]
            test["frames"] += [tuple(frame) for frame in found["frames"]]
            test["said"] = test["said"] or found["said"]
    if code != 0 and set(tests) == {""}:
        tests[""]["failed"] = True
    # what failed outside of tests, beside tests that fail, is a process that was to fail
    if "" in tests and (
        not tests[""]["failed"] or any(name and test["failed"] for name, test in tests.items())
    ):
        del tests[""]
    return tests


def is_test(path: str) -> bool:
    *folders, name = path.split("/")
    return (
        any(part in _TESTS for part in (*folders, name))
        or name.startswith("test_")
        or name.removesuffix(".py").endswith(("_test", "_tests"))
    )


class Source:
    """A file: its lines, and the function and the weight of each."""

    def __init__(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            tree = ast.parse(text)
        except (OSError, ValueError, SyntaxError, RecursionError):
            text, tree = "", ast.Module([], [])
        self.lines = text.split("\n")
        self.functions: list[tuple[int, int, str]] = []
        self.weights: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        """line of a statement -> the last one of its own part"""
        self._walk(tree, "")

    def _walk(self, node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                if not isinstance(child, ast.ClassDef):
                    self.functions.append((child.lineno, child.end_lineno or child.lineno, name))
                self.weights[child.lineno] = -1
            elif isinstance(child, ast.stmt):
                self._weigh(child)
            self._walk(child, name)

    def _weigh(self, statement: ast.stmt) -> None:
        """Give the lines of a statement's own part the number of things that it computes."""
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) and body else statement.end_lineno
        parts = [
            n for n in ast.iter_child_nodes(statement) if not isinstance(n, ast.stmt | ast.excepthandler)
        ]
        computes = sum(isinstance(n, _COMPUTES) for part in parts for n in ast.walk(part))
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Pass):
            computes = -1
        for line in range(statement.lineno, (last or statement.lineno) + 1):
            self.weights[line] = max(self.weights.get(line, -1), computes)
            self.ends[line] = last or line

    def function(self, line: int) -> tuple[int, int, str] | None:
        around = [f for f in self.functions if f[0] <= line <= f[1]]
        return max(around) if around else None

    def place(self, line: int) -> tuple[int, int]:
        """The first and the last line of what is shown around a line."""
        first, last, name = self.function(line) or (1, len(self.lines), "")
        most = _PLACE // 2 if name else _AROUND
        if name and last - first < _PLACE:
            return first, last
        return max(first, line - most), min(last, line + most)

    def shown(self, first: int, last: int) -> list[str]:
        return [text.rstrip() for text in self.lines[first - 1 : last]]


def failure(place: tuple[str, int, int], failing: dict[str, dict[str, Any]]) -> str:
    """The failing test that runs a place and the fewest lines, up to its failure, as pytest shows it."""
    path, first, last = place

    def distance(name: str) -> tuple[bool, int, str]:
        lines = {*failing[name]["lines"], *failing[name]["frames"]}
        return not any(p == path and first <= n <= last for p, n in lines), len(lines), name

    test = failing[min(failing, key=distance)]
    said = [f"E       {line}".rstrip() for line in test["said"].strip().splitlines()[:_SAID]]
    frames = [frame for frame in test["frames"] if is_test(frame[0])] or test["frames"]
    if not frames:
        return "\n".join(said)
    file, line = frames[-1]
    source = Source(file)
    begins, _, _ = source.function(line) or (line, line, "")
    start, end = max(begins, line - _TEST), source.ends.get(line, line)
    text = source.shown(start, end)
    if start > begins:
        text = [*source.shown(begins, begins), "    ...", *text]
    text = textwrap.dedent("\n".join(text)).splitlines()
    marked = len(text) - (end - line) - 1
    lines = [f"{'>' if n == marked else ' '}   {one}".rstrip() for n, one in enumerate(text)]
    return "\n".join([*lines, *said])


def ranked(tests: dict[str, dict[str, Any]], most: int) -> dict[str, Any]:
    """The suspicious lines and functions, the likeliest first."""
    failed_tests = {name: test for name, test in tests.items() if test["failed"]}
    failing = list(failed_tests.values())
    near: dict[tuple[str, int], float] = defaultdict(float)
    failed: dict[tuple[str, int], int] = defaultdict(int)
    for test in failing:
        frames = [frame for frame in test["frames"] if not is_test(frame[0])]
        for depth, frame in enumerate(reversed(frames)):
            near[frame] += 1 / (1 + depth) / len(failing)
        for line in {*test["lines"], *frames}:
            failed[line] += 1
    passed = Counter(line for test in tests.values() if not test["failed"] for line in test["lines"])
    paths = {path for path, _ in failed if path.endswith(".py") and not is_test(path)}
    rows, sources = [], {path: Source(path) for path in paths}
    for (path, line), count in failed.items():
        if path not in sources or (sources[path].weights.get(line, 0) < 0 and not near[path, line]):
            continue
        score = count / math.sqrt(len(failing) * (count + passed[path, line]))
        weight = min(sources[path].weights.get(line, 0), 4)
        rows.append((-(score + 0.1 * near[path, line]), -near[path, line], -weight, path, line, score))
    lines, functions = list[dict[str, Any]](), dict[tuple[str, str], dict[str, Any]]()
    places = list[tuple[str, int, int]]()
    for *_, path, line, score in sorted(rows):
        if len(places) < most and not any(p == path and a <= line <= b for p, a, b in places):
            places.append((path, *sources[path].place(line)))
        first, last, name = sources[path].function(line) or (line, line, "")
        text = "".join(sources[path].lines[line - 1 : line]).rstrip()[:200]
        lines.append({"path": path, "line": line, "score": round(score, 3), "function": name, "source": text})
        if name:
            found = {"path": path, "function": name, "first": first, "last": last}
            functions.setdefault((path, name), found)
    shown = [
        {"path": path, "first": first, "last": last,
         "likely": [n["line"] for n in lines if n["path"] == path and first <= n["line"] <= last][:_LIKELY],
         "source": sources[path].shown(first, last),
         "failure": failure((path, first, last), failed_tests)}
        for path, first, last in places
    ]  # fmt: skip
    return {"lines": lines[:most], "functions": list(functions.values())[:most], "places": shown}


def main() -> None:
    order, began = json.load(sys.stdin), time.monotonic()
    check, tracer = order["check"], order["tracer"]
    code, said, reports = run(check, order["seconds"], tracer)
    tests = merged(reports, code)
    failed = [name for name, test in tests.items() if name and test["failed"]]
    left = order["seconds"] - (time.monotonic() - began)
    if code and len(failed) > 1 and left > 0:  # some may fail by the time that tracing takes
        code_again, _, reports = run(check, left, tracer, failed)
        again = merged(reports, code_again)
        if still := {name for name in failed if name in again and again[name]["failed"]}:
            for name in failed:
                tests[name]["failed"] = name in still
    json.dump(
        {
            "exit": code,
            "failed": sorted(name for name, test in tests.items() if test["failed"]),
            "passed": sum(not test["failed"] for test in tests.values()),
            "output": said.decode("utf-8", "replace"),
            **ranked(tests, order["most"]),
        },
        sys.stdout,
    )


main()
