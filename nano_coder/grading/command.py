"""Grading by a command: run in a fresh jail on the original files plus the agent's changes.

The agent could edit what the check runs, so tests and test configuration are those of the original
workspace; what the agent did to them is reported. What a check that shares a process with the solution
cannot stop (an exit at import, say) is why its trust is below that of hidden checks.
"""

from __future__ import annotations

import fnmatch
import tempfile
from contextlib import closing
from pathlib import Path

from nano_coder.sandbox import ExecResult, Sandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.hashing import content_hash
from nano_shared.snapshot import Entry, Snapshot
from nano_shared.types import Tampering, Task, Trust, Verdict

PROTECTED = (
    "test_*.py", "*_test.py", "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
    "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth",
)  # fmt: skip
PROTECTED_FOLDERS = ("tests", "test")


def grade_command(
    command: str,
    task: Task,
    before: Snapshot,
    after: Snapshot,
    blobs: BlobStore,
    sandbox: Sandbox,
    *,
    grader: str,
    trust: Trust,
) -> Verdict:
    """Reward 1 if the command exits with 0, else 0; a time-out is 0 and named.

    Raises SandboxError where the jail fails.
    """
    tree = restored(before, after)
    with tempfile.TemporaryDirectory(prefix="nano-check-") as folder:
        work = Path(folder) / "work"
        snapshot.materialise(tree, blobs, work)
        with closing(sandbox.open(work, task.limits)) as jail:
            # a whole suite may take longer than one tool call
            result = jail.run(["/bin/sh", "-c", command], timeout=max(task.limits.tool_seconds, 120.0))
    passed = result.exit_code == 0 and not result.timed_out
    return Verdict(
        reward=float(passed),
        components={"check": float(passed)},
        checks={"check": "pass" if passed else "timeout" if result.timed_out else "fail"},
        tampering=tampering(before, after),
        failure_kind=_failure(result),
        trust=trust,
        grader=grader,
        graded_hash=content_hash([command, [[e.path, e.kind, e.mode, e.content] for e in tree.entries]]),
    )


def restored(before: Snapshot, after: Snapshot) -> Snapshot:
    """The agent's workspace with every protected path as it was in the original."""
    kept = [entry for entry in after.entries if not is_protected(entry.path)]
    original = [entry for entry in before.entries if is_protected(entry.path)]
    return _with_parents([*kept, *original])


def tampering(before: Snapshot, after: Snapshot) -> tuple[Tampering, ...]:
    """What the agent did to protected paths."""
    findings = []
    for path in snapshot.changed_paths(before, after):
        if is_protected(path) and not _is_folder(before, after, path):
            how = (
                "added"
                if path not in before.by_path
                else "deleted"
                if path not in after.by_path
                else "changed"
            )
            findings.append(Tampering(kind="test_edited", detail=f"{how} {path}"))
    return tuple(findings)


def is_protected(path: str) -> bool:
    *folders, name = path.split("/")
    return any(fnmatch.fnmatch(name, pattern) for pattern in PROTECTED) or bool(
        set(folders) & set(PROTECTED_FOLDERS)
    )


def _with_parents(entries: list[Entry]) -> Snapshot:
    """A protected file may lie where the agent put something else; the original wins."""
    found = {entry.path: entry for entry in entries}
    for path in list(found):
        parent = path.rpartition("/")[0]
        while parent:
            at = found.get(parent)
            if at is None or at.kind is not snapshot.Kind.DIRECTORY:
                found[parent] = Entry(parent, snapshot.Kind.DIRECTORY, 0o755, None)
            parent = parent.rpartition("/")[0]
    return Snapshot(tuple(sorted(found.values())))


def _is_folder(before: Snapshot, after: Snapshot, path: str) -> bool:
    at = after.by_path.get(path) or before.by_path.get(path)
    return at is not None and at.kind is snapshot.Kind.DIRECTORY


def _failure(result: ExecResult) -> str | None:
    if result.timed_out:
        return "agent_timeout"
    if result.exit_code in (126, 127):
        return "check_not_found"
    return None
