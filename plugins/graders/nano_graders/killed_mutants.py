"""Tests that the agent wrote: they must pass on the reference and fail on every mutant.

They can tell right from wrong by behaviour only. Each source is tried twice, in an order unknown to the
tests; tests that contradict themselves earn nothing.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from contextlib import closing
from typing import Literal

from nano_coder.grading.grade import REFERENCE
from nano_coder.grading.hidden_cases import GradingOutcome, Submission
from nano_coder.sandbox.protocol import Sandbox
from nano_graders.two_jail_suite import Job, NeedsStrict, TestsFailed, run_suite
from nano_shared.errors import SandboxError
from nano_shared.hidden_checks import MutantChecks, Suite
from nano_shared.types import Limits, Tampering, Task

Framework = Literal["script", "unittest", "pytest"]

_ROUNDS = 2


def grade_mutants(given: Submission) -> GradingOutcome:
    """Checks `reference`, and `killed_NAME` for each mutant. Raises SandboxError if a jail fails."""
    task, hidden, files, sandbox = given.task, given.checks, given.files, given.sandbox
    assert isinstance(hidden, MutantChecks)
    names = [f"killed_{name}" for name in hidden.mutants]
    tests = {name: data.decode("utf-8", "replace") for name, data in files.items()}
    suite = Suite(framework=_framework(tests), files=tests)
    first = _passes(task, hidden, suite, hidden.reference, sandbox)
    if not first:
        return GradingOutcome({REFERENCE: "fail", **dict.fromkeys(names, "error")}, (), "fails_on_reference")
    runs = [(REFERENCE, hidden.reference), *hidden.mutants.items()] * _ROUNDS
    random.Random(secrets.randbits(64)).shuffle(runs)
    passes_by_source: dict[str, set[bool]] = {}
    for name, source in runs:
        passes_by_source.setdefault(name, set()).add(_passes(task, hidden, suite, source, sandbox))
    checks = {REFERENCE: "pass" if passes_by_source[REFERENCE] == {True} else "fail"}
    checks |= {
        f"killed_{name}": "pass" if passes_by_source[name] == {False} else "fail" for name in hidden.mutants
    }
    undecided = sorted(name for name, seen in passes_by_source.items() if len(seen) > 1)
    if undecided:
        found = Tampering(kind="flaky", detail=f"the tests pass and fail on the same source: {undecided[0]}")
        return GradingOutcome(checks, (found,), "flaky")
    return GradingOutcome(checks)


def _passes(task: Task, hidden: MutantChecks, suite: Suite, source: str, sandbox: Sandbox) -> bool:
    """Whether at least one test ran and all passed. Tests that break their own jail do not pass."""
    module = hidden.module
    originals = {
        name: text for name, text in task.files.items() if name != module and name not in suite.files
    }
    job = Job(suite, module, {module: source.encode()}, originals)
    try:
        outcome = run_suite(job, task.limits, sandbox)
    except (TestsFailed, NeedsStrict):
        with closing(sandbox.open(None, Limits())) as jail:
            if jail.run_python("print(1)", isolated=True).stdout != b"1\n":
                raise SandboxError("no jail works: the agent's tests were not run") from None
        return False
    return outcome.passed == 1.0


def _framework(tests: Mapping[str, str]) -> Framework:
    text = "\n".join(tests.values())
    if "unittest" in text and "TestCase" in text:
        return "unittest"
    return "pytest" if "def test" in text else "script"
