"""Which functions each test of a package calls: its test files run once, traced, in a jail."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nano_coder.grading.command_check import workspace_jail
from nano_coder.sandbox.protocol import Sandbox
from nano_mining.packages import MinedPackage
from nano_shared.types import Limits

LIMITS = Limits(max_turns=24, max_tokens=8192)
SECONDS = 240.0
"""wall time of one traced test file; tests that have ended by then count"""
SLOWEST = 2.0
"""seconds of a traced test that is still used; one that takes five times as long is ended"""
_PROGRAM = (Path(__file__).parent / "inside" / "call_tracer.py").read_text(encoding="utf-8")
_FOLDER, _FOUND = ".nano-calls", "/work/.nano-calls/found.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTest:
    """A test that passes, with the functions of the workspace that it calls."""

    file: str
    name: str
    """of the function or method, without class and parameters"""
    seconds: float
    options: str
    """of pytest, that its file needs"""
    calls: frozenset[tuple[str, int]]
    """(file, first line, decorators included)"""


def pytest_arguments(words: Iterable[str]) -> list[str]:
    """Arguments of pytest without the configuration of a package."""
    own = ("-q", "-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider")
    return [*own, *(part for word in words for part in word.split())]


def search_path(package: MinedPackage, *before: str) -> str:
    return ":".join([*before, *(root or "." for root in package.roots)])


def pytest_command(package: MinedPackage, words: Iterable[str], *before: str) -> str:
    """The shell line that runs test files of a package: no configuration, no plugins of this machine."""
    path, arguments = search_path(package, *before), shlex.join(pytest_arguments(words))
    return f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH={path} python -m pytest {arguments}"


OPTIONS = ("", "--noconftest")
"""tried in turn: a `conftest.py` may need another pytest, or plugins"""


def trace_file(package: MinedPackage, file: str, sandbox: Sandbox) -> list[dict[str, object]]:
    """The rows of the tracer for one test file: what did not end in time, or broke pytest, is missing."""
    for options in OPTIONS:
        if rows := _trace(package, file, options, sandbox):
            return [row | {"options": options} for row in rows]
    return []


def _trace(package: MinedPackage, file: str, options: str, sandbox: Sandbox) -> list[dict[str, object]]:
    command = pytest_command(package, [options, "-p call_tracer", file], _FOLDER)
    env = {"PYTHONDONTWRITEBYTECODE": "1", "NANO_CALLS": _FOUND, "NANO_SLOWEST": str(5 * SLOWEST)}
    with workspace_jail(package.tree, package.blobs, sandbox, LIMITS) as jail:
        jail.write(f"{_FOLDER}/call_tracer.py", _PROGRAM.encode())
        jail.run(["/bin/sh", "-c", command], timeout=SECONDS, env=env)
        try:
            lines = jail.read(f"{_FOLDER}/found.jsonl").decode("utf-8", "replace").split("\n")
        except OSError:
            return []
    return [row for line in lines[:-1] if isinstance(row := _parsed(line), dict)]


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def traced_tests(rows: Iterable[dict[str, object]]) -> list[TracedTest]:
    """The tests that passed soon enough. The rows come from a jail: those of another shape are left out."""
    return [test for row in rows if (test := _traced(row)) is not None]


def _traced(row: dict[str, object]) -> TracedTest | None:
    match row:
        case {
            "test": str(test),
            "passed": True,
            "seconds": float(took),
            "calls": [*calls],
            "options": str(o),
        }:
            file, _, name = test.partition("::")
            name = name.partition("[")[0].rpartition("::")[2]
            places = frozenset((str(c[0]), int(c[1])) for c in calls if isinstance(c, list) and len(c) == 2)
            if took <= SLOWEST and places:
                return TracedTest(file=file, name=name, seconds=took, options=o, calls=places)
    return None
