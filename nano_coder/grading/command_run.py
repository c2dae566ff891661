"""One execution of a check by command, in a fresh jail, with the test runner's own report."""

from __future__ import annotations

import posixpath
import re
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from nano_coder.grading.impossible_tests import impossible, impossible_files
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.files import content_hash, in_memory, scratch_folder
from nano_shared.printable import terminal_text
from nano_shared.snapshot import Snapshot
from nano_shared.types import Limits

_PATIENCE = 120.0
"""seconds for a check, which may run a whole test suite"""
_MOST_ORIGINALS = 256
Reader = Callable[[Jail], str]
_locks: dict[str, threading.Lock] = {}
_originals: dict[str, Ran] = {}


_STOPS = re.compile(r"(?<=\s)(?:--exitfirst|--maxfail[= ]\d+|-([a-zA-Z]*)x([a-zA-Z]*))(?=\s|$)")
"""options of pytest that end it at a failure"""


@dataclass(frozen=True, slots=True)
class TestCounts:
    """Totals of a test runner's report."""

    passed: int
    bad: int
    """failures and errors"""
    skipped: int
    named: frozenset[str] = frozenset()
    """test functions that passed, where the report names them"""


@dataclass(frozen=True, slots=True)
class Ran:
    """One execution of a check."""

    result: ExecResult
    counts: TestCounts | None
    kept: tuple[str, ...] = ()
    """what was read in its jail after it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun:
    """A check by command, with its sandbox and limits."""

    command: str
    blobs: BlobStore
    sandbox: Sandbox
    limits: Limits
    seconds: float

    def run(self, tree: Snapshot, *, keep: tuple[Reader, ...] = ()) -> Ran:
        """Run the check on a tree, and then each of `keep` in its jail. Raises SandboxError if the sandbox
        failed."""
        report = f".nano-{secrets.token_hex(8)}.xml"
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        if by_pytest(self.command):
            env["PYTEST_ADDOPTS"] = f"--junitxml=/work/{report}"
        with workspace_jail(tree, self.blobs, self.sandbox, self.limits) as jail:
            result = jail.run(["/bin/sh", "-c", self.command], env=env, timeout=self.seconds)
            unittest = by_unittest(self.command)
            counts = _unittest_counts(result.stdout + result.stderr) if unittest else _counts(jail, report)
            return Ran(result, counts, tuple(read(jail) for read in keep))

    def impossible(self, tests: Mapping[str, str], log: str) -> tuple[str, dict[str, str]]:
        """The check's command and test files as no work can pass them; what has no variant stays."""
        words = _words(self.command)
        if len(words) == 3 and words[1] == "-c" and posixpath.basename(words[0]).startswith("python"):
            code = impossible(words[2], log)
            return (self.command if code is None else shlex.join([*words[:2], code])), {}
        return self.command, impossible_files(tests, log)

    def to_the_end(self) -> CommandRun:
        """This check, whose pytest runs all tests however many fail."""
        text = _STOPS.sub(
            lambda found: f"-{found[1]}{found[2]}" if found[1] or found[2] else "", self.command
        )
        # options of the environment override those of a configuration
        return replace(self, command=f'export PYTEST_ADDOPTS="$PYTEST_ADDOPTS --maxfail=0"\n{text}')

    def original(self, before: Snapshot) -> Ran:
        """The check on the original files; executed once in this process."""
        where = [self.sandbox.name, self.sandbox.python, self.seconds, self.limits.model_dump(mode="json")]
        key = content_hash([tree_hash(before), self.command, where])
        with _locks.setdefault(key, threading.Lock()):
            if key not in _originals:
                for old in list(_originals)[: max(0, len(_originals) - _MOST_ORIGINALS)]:
                    _originals.pop(old, None)
                    _locks.pop(old, None)
                _originals[key] = self.run(before)
            return _originals[key]


def tree_hash(tree: Snapshot) -> str:
    """Hash of a whole graded workspace."""
    return content_hash([[e.path, e.kind, e.mode, e.content] for e in tree.entries])


def check_patience(limits: Limits) -> float:
    """Longest time of a check, seconds."""
    return max(limits.tool_seconds, _PATIENCE)


@contextmanager
def workspace_jail(tree: Snapshot, blobs: BlobStore, sandbox: Sandbox, limits: Limits) -> Iterator[Jail]:
    """A fresh jail that holds a tree. Raises SandboxError if it cannot be opened."""
    with scratch_folder("check", in_memory()) as folder:
        work = folder / "work"
        snapshot.materialise(tree, blobs, work)
        with closing(sandbox.open(work, limits)) as jail:
            yield jail


def by_pytest(command: str) -> bool:
    return re.search(r"\b(pytest|py\.test)\b", command) is not None


def by_unittest(command: str) -> bool:
    return re.search(r"-m\s+unittest\b", command) is not None


def _unittest_counts(output: bytes) -> TestCounts | None:
    """The totals of unittest's last summary; None without one."""
    text = terminal_text(output.decode("utf-8", "replace")).rstrip()
    ran = re.findall(r"^Ran (\d+) tests? in", text, re.MULTILINE)
    end = re.search(r"^OK(?: \((.*)\))?$", text.splitlines()[-1]) if text else None
    if not ran or end is None:
        return None
    skipped = int(found.group(1)) if (found := re.search(r"skipped=(\d+)", end.group(1) or "")) else 0
    return TestCounts(int(ran[-1]) - skipped, 0, skipped)


def _counts(jail: Jail, report: str) -> TestCounts | None:
    """The totals of pytest's report; None without one."""
    text = text_in(jail, report)
    suite = re.search(r"<testsuite [^>]*>", text)
    if suite is None:
        return None
    total, failures, errors, skipped = (
        int(found.group(1)) if (found := re.search(rf'\b{key}="(\d+)"', suite.group(0))) else 0
        for key in ("tests", "failures", "errors", "skipped")
    )
    cases = re.findall(r'<testcase [^>]*?\bname="(\w+)[^>]*?(?:/>|>(.*?)</testcase>)', text, re.DOTALL)
    passed = {name for name, inside in cases if not re.search("<(failure|error|skipped)", inside)}
    return TestCounts(total - failures - errors - skipped, failures + errors, skipped, frozenset(passed))


def _words(command: str) -> list[str]:
    """The words of a shell line that is one plain command; else none."""
    try:
        parts = list(shlex.shlex(command, posix=True, punctuation_chars=True))
        words = shlex.split(command)
    except ValueError:
        return []
    return words if not any(set(part) <= set("();<>|&") for part in parts) else []


def text_in(jail: Jail, path: str) -> str:
    """The text of a file in a jail; empty without one."""
    try:
        return jail.read(path).decode("utf-8", "replace")
    except OSError:
        return ""
