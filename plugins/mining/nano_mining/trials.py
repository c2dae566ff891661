"""Which of many broken versions of a package its tests notice: all are tried in one warm jail.

A process of the jail imports pytest once and is forked for each version, so that a version costs the import
of the package and its tests. The right code is tried first and last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nano_coder.grading.command_check import workspace_jail
from nano_coder.sandbox.protocol import Sandbox
from nano_mining.packages import MinedPackage
from nano_mining.traces import LIMITS, pytest_arguments, search_path

_PROGRAM = (Path(__file__).parent / "inside" / "trials.py").read_text(encoding="utf-8")
_FIRST, _TIMES, _MORE, _ALL = 60.0, 10.0, 4.0, 200.0
"""seconds of the right code; a version may take so many times as long and so many more; of all, a function"""
_FAILED = (1, 2, 4)
"""exit codes of pytest: tests failed, a test file or a conftest.py cannot be imported"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A change of one file."""

    group: str
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the tests showed of a version."""

    refusal: str | None
    """why it is no task; None if the tests fail on it"""
    failed: str = ""
    """id of the first test that failed; empty if it was none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """Tests of a function, and the versions that are tried on them."""

    words: Sequence[str]
    """what pytest is told"""
    files: Mapping[str, str]
    """path -> text of the test files"""
    versions: Sequence[Version]
    most: Mapping[str, int]
    """of these groups no more are tried once so many have failed"""


def try_versions(
    package: MinedPackage, jobs: Sequence[TrialJob], sandbox: Sandbox
) -> list[list[Trial | None] | None]:
    """Of each job its versions' trials, None for those not tried; None if the right code fails."""
    rows = [
        {
            # without rewritten assertions a test file is compiled in half the time
            "arguments": [*pytest_arguments(job.words), "--assert=plain"], "files": dict(job.files),
            "versions": [[v.group, v.path, v.text] for v in job.versions], "most": dict(job.most),
            "first": _FIRST, "times": _TIMES, "more": _MORE,
        }
        for job in jobs
    ]  # fmt: skip
    env = {
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/tmp/compiled",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": search_path(package),
    }  # fmt: skip
    with workspace_jail(package.tree, package.blobs, sandbox, LIMITS) as jail:
        command = ["python", "-c", _PROGRAM]
        result = jail.run(command, stdin=json.dumps(rows).encode(), env=env, timeout=_ALL * len(jobs))
    lines = [*result.stdout.splitlines(), *[b""] * len(jobs)]
    return [_trials(line, len(job.versions)) for line, job in zip(lines, jobs, strict=False)]


def _trials(line: bytes, count: int) -> list[Trial | None] | None:
    try:
        first, *rows, last = json.loads(line)
        good = len(rows) == count and _passed(first) and _passed(last)
        return [_trial(row, bool(first["skipped"])) for row in rows] if good else None
    except (ValueError, TypeError, KeyError):  # the rows come from a jail
        return None


def _passed(row: Mapping[str, object]) -> bool:
    return row["exit"] == 0 and row["passed"] != 0


def _trial(row: Mapping[str, object] | None, skips: bool) -> Trial | None:
    """`skips`: whether right code skips tests; a grader would take it for tampering of broken code."""
    if row is None:
        return None
    if row["exit"] == 0:
        return Trial(refusal="the tests pass on it")
    if row["exit"] not in _FAILED:
        return Trial(refusal="the tests do not fail plainly on it")
    if skips and not row["failed"]:
        return Trial(refusal="no test runs on it, and tests are skipped on the right code")
    return Trial(refusal=None, failed=str(row["failed"]))
