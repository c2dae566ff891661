"""A user's check, run in a fresh jail on the original files plus the agent's changes.

Tests, configuration and whatever else decides over the check are taken from the original; attempted changes
to them are reported. The code under test shares the check's process, so the trust is USER_CHECK.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

from nano_coder.grading.protected import RUNNERS, protected
from nano_coder.grading.version import GRADER
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.hashing import content_hash
from nano_shared.printable import printable
from nano_shared.scratch import in_memory, scratch_folder
from nano_shared.snapshot import Entry, Kind, Snapshot
from nano_shared.types import CheckRun, Limits, Tampering, Trust, Verdict

_TAIL = 4000
"""characters of a check's output that its verdict keeps"""
_MISSING = re.compile(
    r"^(?:\S*python[\d.]*: (No module named \S+)|\S*sh: (?:line )?\d+: (.*(?:not found|[Pp]ermission denied))"
    r"|make[][\d]*: (\S+: No such file or directory))(?:\nmake[][\d]*: \*\*\*.*)*\Z",
    re.MULTILINE,
)
"""what an interpreter, a shell and make say last of a program that they cannot begin"""
_PATIENCE = 120.0
"""seconds; a whole suite may take longer than one tool call"""


@dataclass(frozen=True, slots=True)
class Counts:
    """What the runner's own report says."""

    passed: int
    bad: int
    """failures and errors"""
    skipped: int


def grade_command(
    command: str,
    *,
    before: Snapshot,
    after: Snapshot,
    blobs: BlobStore,
    sandbox: Sandbox,
    limits: Limits,
    trust: Trust = Trust.USER_CHECK,
    timeout: float | None = None,
) -> Verdict:
    """Run a check on `after`, with what decides over the check as it was in `before`.

    Exit code 0 earns 1.0. A check by pytest or unittest must also leave the runner's own report, with a test
    that passed and no more skipped tests than the original has: leaving the process early is no pass.
    The reward is None where the check cannot be run on the original either, for want of a program or a test
    runner that no workspace holds.
    `timeout`, in seconds, defaults to the longer of two minutes and one tool call. Raises SandboxError where
    the sandbox failed.
    """
    tree, tampering = restored(command, before, after)
    seconds = timeout or check_patience(limits)
    result, counts = _run(command, tree, blobs, sandbox, limits, seconds)
    found = None
    if result.ok and (_by_pytest(command) or _by_unittest(command)):
        found = _doubts(counts, lambda: _run(command, before, blobs, sandbox, limits, seconds)[1])
    right = result.ok and found is None
    ran = _how_it_ended(result)
    if ran.not_run is not None:
        original = _how_it_ended(_run(command, before, blobs, sandbox, limits, seconds)[0])
        # the agent's own program may say so
        ran = ran if original.not_run == ran.not_run else ran.model_copy(update={"not_run": None})
    ours = _nobodys_fault(ran.not_run, command)
    state = "pass" if right else "timeout" if result.timed_out else "error" if ran.not_run else "fail"
    return Verdict(
        reward=None if ours else float(right), components={"tests": None if ours else float(right)},
        checks={"check": state}, tampering=(*tampering, *([found] if found else [])),
        failure_kind=_failure(result, ran), trust=Trust.NONE if ours else trust, grader=GRADER,
        graded_hash=tree_hash(tree), check_run=ran,
    )  # fmt: skip


def _how_it_ended(result: ExecResult) -> CheckRun:
    """The facts of a check's end that its verdict keeps."""
    output = b"\n".join(stream.strip() for stream in (result.stdout, result.stderr) if stream.strip())
    text = printable(output.decode("utf-8", "replace"))
    missing = None if result.ok or result.timed_out else _MISSING.search(text)
    return CheckRun(
        exit_code=result.exit_code, signal=result.signal, timed_out=result.timed_out,
        not_run=next(filter(None, missing.groups())) if missing else None, output=text[-_TAIL:],
    )  # fmt: skip


def _nobodys_fault(missing: str | None, command: str) -> bool:
    """Whether what the check lacks is no agent's to supply: a bare command, or the module of a test runner.

    A script or another module may be what the task asks for.
    """
    if missing is None:
        return False
    module = missing.startswith("No module named ")
    name = missing.removeprefix("No module named ").partition(":")[0].strip("'\"")
    return name in RUNNERS if module else "/" not in name and "PATH" not in command


def run_check(
    command: str, *, before: Snapshot, after: Snapshot, blobs: BlobStore, sandbox: Sandbox, limits: Limits
) -> ExecResult:
    """What a check prints on the tree that it would be graded on. Raises SandboxError as grading does."""
    tree, _ = restored(command, before, after)
    return _run(command, tree, blobs, sandbox, limits, check_patience(limits))[0]


def tree_hash(tree: Snapshot) -> str:
    """Hash of a whole workspace that was graded."""
    return content_hash([[e.path, e.kind, e.mode, e.content] for e in tree.entries])


def check_patience(limits: Limits) -> float:
    """Seconds that a check may take."""
    return max(limits.tool_seconds, _PATIENCE)


@contextmanager
def workspace_jail(tree: Snapshot, blobs: BlobStore, sandbox: Sandbox, limits: Limits) -> Iterator[Jail]:
    """A fresh jail that holds a tree. Raises SandboxError where it cannot be opened."""
    with scratch_folder("check", in_memory()) as folder:
        work = folder / "work"
        snapshot.materialise(tree, blobs, work)
        with closing(sandbox.open(work, limits)) as jail:
            yield jail


def restored(command: str, before: Snapshot, after: Snapshot) -> tuple[Snapshot, tuple[Tampering, ...]]:
    """The agent's workspace with what decides over the check as it was, and what is reported of the changes
    that were not kept. A new test is left out unreported."""
    originals = {entry.path for entry in before.entries if entry.kind is not Kind.DIRECTORY}
    kept = dict(after.by_path)
    found = []
    for path in snapshot.changed_paths(before, after):
        at = after.by_path.get(path) or before.by_path[path]
        why = protected(path, command, originals) if at.kind is not Kind.DIRECTORY else None
        if why is None:
            continue
        kept.pop(path, None)
        if path in originals:
            kept[path] = before.by_path[path]
        if path in originals or (why in ("configuration", "shadowing") and not _cache(path)):
            done = "deleted" if path not in after.by_path else "changed" if path in originals else "added"
            found.append(Tampering(kind=why, detail=f"{printable(path)} was {done}; the original was used"))
    return _with_parents(kept), tuple(found)


def laid_over(tree: Snapshot, files: Mapping[str, str], blobs: BlobStore) -> Snapshot:
    """The tree with files put into it, whatever the agent left in their places."""
    if not files:
        return tree
    below = tuple(f"{name}/" for name in files)
    kept = {path: entry for path, entry in tree.by_path.items() if not path.startswith(below)}
    for name, text in files.items():
        kept[name] = Entry(name, Kind.FILE, 0o644, blobs.put(text.encode("utf-8", "surrogatepass")))
    return _with_parents(kept)


def _with_parents(entries: dict[str, Entry]) -> Snapshot:
    """A restored file may lie where the agent put something else; the original wins."""
    for path in list(entries):
        parent = path.rpartition("/")[0]
        while parent:
            if parent not in entries or entries[parent].kind is not Kind.DIRECTORY:
                entries[parent] = Entry(parent, Kind.DIRECTORY, 0o755, None)
            parent = parent.rpartition("/")[0]
    return Snapshot(tuple(sorted(entries.values())))


def _cache(name: str) -> bool:
    """Files that runs leave behind by themselves."""
    return "__pycache__/" in name or ".pytest_cache/" in name


def _run(
    command: str, tree: Snapshot, blobs: BlobStore, sandbox: Sandbox, limits: Limits, seconds: float
) -> tuple[ExecResult, Counts | None]:
    with workspace_jail(tree, blobs, sandbox, limits) as jail:
        report = f".nano-{secrets.token_hex(8)}.xml"
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        if _by_pytest(command):
            env["PYTEST_ADDOPTS"] = f"--junitxml=/work/{report}"
        result = jail.run(["/bin/sh", "-c", command], env=env, timeout=seconds)
        if _by_unittest(command):
            return result, _unittest_counts(result.stdout + result.stderr)
        return result, _counts(jail, report)


def _failure(result: ExecResult, ran: CheckRun) -> str | None:
    if result.timed_out:
        return "agent_timeout"
    if result.oom:
        return "memory"
    return "check_not_found" if ran.not_run is not None else None


def _by_pytest(command: str) -> bool:
    return re.search(r"\b(pytest|py\.test)\b", command) is not None


def _by_unittest(command: str) -> bool:
    return re.search(r"-m\s+unittest\b", command) is not None


def _unittest_counts(output: bytes) -> Counts | None:
    """The totals of the last summary of unittest; None where it wrote none."""
    text = output.decode("utf-8", "replace").rstrip()
    ran = re.findall(r"^Ran (\d+) tests? in", text, re.MULTILINE)
    end = re.search(r"^OK(?: \((.*)\))?$", text.splitlines()[-1]) if text else None
    if not ran or end is None:
        return None
    skipped = int(found.group(1)) if (found := re.search(r"skipped=(\d+)", end.group(1) or "")) else 0
    return Counts(int(ran[-1]) - skipped, 0, skipped)


def _counts(jail: Jail, report: str) -> Counts | None:
    """The totals of pytest's report; None where it left none."""
    try:
        text = jail.read(report).decode("utf-8", "replace")
    except OSError:
        return None
    suite = re.search(r"<testsuite [^>]*>", text)
    if suite is None:
        return None
    total, failures, errors, skipped = (
        int(found.group(1)) if (found := re.search(rf'\b{key}="(\d+)"', suite.group(0))) else 0
        for key in ("tests", "failures", "errors", "skipped")
    )
    return Counts(total - failures - errors - skipped, failures + errors, skipped)


def _doubts(counts: Counts | None, original: Callable[[], Counts | None]) -> Tampering | None:
    """Why an exit code of 0 from pytest is not believed. `original` runs the check on the original."""
    if counts is None:
        return Tampering(
            kind="exit", detail="the check ended with 0 but left no report: the process was left early"
        )
    if counts.bad or counts.passed < 1:
        return Tampering(kind="forged", detail=f"the check ended with 0, but its report says {counts}")
    if counts.skipped:
        before = original()
        if before is not None and counts.skipped > before.skipped:
            return Tampering(kind="skip", detail=f"{counts.skipped} tests skipped, {before.skipped} before")
    return None
