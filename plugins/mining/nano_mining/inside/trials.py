"""Runs inside the jail: tests of a package on many versions of it, each in a fork of a process that has
imported pytest already.

Standard library and pytest only. stdin: a list of {"arguments": of pytest, "files": {test file: text},
"versions": [[group, path, text], ...], "most": {group: failing versions wanted}, "first": s, "times": t,
"more": m}: the right code has s seconds, a version t times as long as that took and m seconds more. stdout:
of each a JSON list of the right code, of each version, and of the right code again: {"exit": exit code, or
null after a signal or too long a time, "failed": id of the first failed test, "passed" and "skipped":
numbers}; null for a version that was not wanted any more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import py_compile
import select
import signal
import sys
import time
from typing import Any

import pytest
from _pytest.config import default_plugins

ROOT = os.getcwd() + os.sep
compiled: set[str] = set()


class TrialCounts:
    """A plugin of pytest that counts."""

    def __init__(self) -> None:
        self.passed = self.skipped = 0
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped
        if report.failed and not self.failed:
            self.failed = report.nodeid


def child(arguments: list[str], channel: int) -> None:
    """Run pytest and write what came of it. Does not return."""
    code = None
    with contextlib.suppress(BaseException):
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        counts = TrialCounts()
        code = int(pytest.main(arguments, plugins=[counts]))
        files = {n: getattr(m, "__file__", None) or "" for n, m in list(sys.modules.items())}
        row = {"exit": code, "modules": files, **vars(counts)}
        data = json.dumps(row).encode() + b"\n"
        while data:
            data = data[os.write(channel, data) :]
    os._exit(0)


def run(arguments: list[str], seconds: float) -> dict[str, Any]:
    """The row of one version; exit is null if its process wrote none in time."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        child(arguments, writing)
    os.close(writing)
    data, until = b"", time.monotonic() + seconds
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (piece := os.read(reading, 1 << 16)):
            break
        data += piece
        if data.endswith(b"\n"):  # what a test has left running may hold the pipe open
            break
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    try:
        return dict(json.loads(data))
    except ValueError:
        return {"exit": None, "failed": "", "passed": 0, "skipped": 0, "modules": {}}


def prepare(modules: dict[str, str]) -> None:
    """Import the standard modules that tests used; compile the workspace's once, to compare sources."""
    for name, file in sorted(modules.items()):
        if name.partition(".")[0] in sys.stdlib_module_names and name != "__main__":
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        elif file.startswith(ROOT) and file.endswith(".py") and file not in compiled:
            compiled.add(file)
            with contextlib.suppress(OSError, py_compile.PyCompileError):
                py_compile.compile(file, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    gc.freeze()  # so that a fork shares what is there


def write(path: str, text: str) -> str:
    """Replace the text of a file; returns the one it had."""
    with open(path, encoding="utf-8", newline="") as file:
        original = file.read()
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    return original


def rows_of(job: dict[str, Any]) -> list[Any]:
    arguments, most = job["arguments"], job["most"]
    began = time.monotonic()
    right = run(arguments, job["first"])
    limit = job["times"] * (time.monotonic() - began) + job["more"]
    prepare(right["modules"])
    rows: list[Any] = [right]
    for group, path, text in job["versions"] if right["exit"] == 0 else ():
        if most.get(group, 1) == 0:
            rows.append(None)
            continue
        original = write(path, text)
        rows.append(run(arguments, limit))
        write(path, original)
        if group in most and rows[-1]["exit"] not in (0, None):
            most[group] -= 1
    return [*rows, run(arguments, limit)]


def main() -> None:
    jobs = json.loads(sys.stdin.read())
    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    if any((getattr(m, "__file__", None) or "").startswith(ROOT) for m in list(sys.modules.values())):
        sys.exit("pytest itself uses a module of the workspace")
    for job in jobs:
        originals = {path: write(path, text) for path, text in job["files"].items()}
        rows = rows_of(job)
        for path, text in originals.items():
            write(path, text)
        kept = ("exit", "failed", "passed", "skipped")
        print(json.dumps([row and {key: row[key] for key in kept} for row in rows]))


main()
