"""A user's check, run in a fresh jail on the original files plus the agent's changes.

Tests, configuration and whatever else decides over the check are taken from the original; attempted changes
to them are reported. The code under test shares the check's process, so the trust is USER_CHECK.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nano_coder.grading.protected import protected
from nano_coder.grading.version import GRADER
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox
from nano_shared.errors import SandboxError
from nano_shared.hashing import content_hash
from nano_shared.types import Limits, Tampering, Trust, Verdict

_DELETE = "import json, os, sys\nfor path in json.load(sys.stdin):\n    os.unlink(path)\n"


@dataclass(frozen=True, slots=True)
class Counts:
    """What pytest's own report says."""

    passed: int
    bad: int
    """failures and errors"""
    skipped: int


def grade_command(
    command: str, *, original: Path, changes: Mapping[str, bytes | None], sandbox: Sandbox, limits: Limits
) -> Verdict:
    """Run a check on `original` with the agent's changes applied; a change to None is a deletion.

    Exit code 0 earns 1.0. A check by pytest must also leave pytest's own report, with a test that passed and
    no more skipped tests than the original has: leaving the process early is no pass. The reward is None,
    with the failure kind "verifier_error", where the sandbox failed.
    """
    kept, tampering = _sort(command, original, changes)
    digest = content_hash([[n, None if d is None else content_hash(d)] for n, d in sorted(kept.items())])
    try:
        result, counts = _run(command, original, kept, sandbox, limits)
        found = _doubts(command, result, counts, original, sandbox, limits) if result.ok else None
    except SandboxError:
        return Verdict(
            reward=None, components={"tests": None}, tampering=tampering, failure_kind="verifier_error",
            trust=Trust.NONE, grader=GRADER, graded_hash=digest,
        )  # fmt: skip
    right = result.ok and found is None
    kind = "timeout" if result.timed_out else "memory" if result.oom else None
    return Verdict(
        reward=float(right), components={"tests": float(right)},
        checks={"check": "pass" if right else "timeout" if result.timed_out else "fail"},
        tampering=(*tampering, *([found] if found else [])), failure_kind=kind, trust=Trust.USER_CHECK,
        grader=GRADER, graded_hash=digest,
    )  # fmt: skip


def _sort(
    command: str, original: Path, changes: Mapping[str, bytes | None]
) -> tuple[dict[str, bytes | None], tuple[Tampering, ...]]:
    """The changes that are applied, and what is reported of the others. A new test is left out unreported."""
    originals = {name for name in changes if (original / name).is_file()}
    kept: dict[str, bytes | None] = {}
    found = []
    for name, data in sorted(changes.items()):
        why = protected(name, command, originals)
        if why is None:
            kept[name] = data
        elif name in originals or (why in ("configuration", "shadowing") and not _cache(name)):
            done = "deleted" if data is None else "changed" if name in originals else "added"
            found.append(Tampering(kind=why, detail=f"{name} was {done}; the original was used"))
    return kept, tuple(found)


def _cache(name: str) -> bool:
    """Files that runs leave behind by themselves."""
    return "__pycache__/" in name or ".pytest_cache/" in name


def _run(
    command: str, original: Path, changes: Mapping[str, bytes | None], sandbox: Sandbox, limits: Limits
) -> tuple[ExecResult, Counts | None]:
    with closing(sandbox.open(original, limits)) as jail:
        for name, data in changes.items():
            if data is not None:
                jail.write(name, data)
        gone = [n for n, d in changes.items() if d is None and (original / n).is_file()]
        if gone:
            jail.run([sandbox.python, "-I", "-c", _DELETE], stdin=json.dumps(gone).encode())
        report = f".nano-{secrets.token_hex(8)}.xml"
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        if _by_pytest(command):
            env["PYTEST_ADDOPTS"] = f"--junitxml=/work/{report}"
        result = jail.run(["/bin/sh", "-c", command], env=env, timeout=limits.tool_seconds)
        return result, _counts(jail, report)


def _by_pytest(command: str) -> bool:
    return re.search(r"\b(pytest|py\.test)\b", command) is not None


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


def _doubts(
    command: str, result: ExecResult, counts: Counts | None, original: Path, sandbox: Sandbox, limits: Limits
) -> Tampering | None:
    """Why an exit code of 0 from pytest is not believed."""
    if not _by_pytest(command):
        return None
    if counts is None:
        return Tampering(
            kind="exit", detail="pytest ended with 0 but left no report: the process was left early"
        )
    if counts.bad or counts.passed < 1:
        return Tampering(kind="forged", detail=f"pytest ended with 0, but its report says {counts}")
    if counts.skipped:
        _, before = _run(command, original, {}, sandbox, limits)
        if before is not None and counts.skipped > before.skipped:
            return Tampering(kind="skip", detail=f"{counts.skipped} tests skipped, {before.skipped} before")
    return None
