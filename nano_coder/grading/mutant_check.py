"""Tests that the agent wrote: they must pass on the right source and fail on every mutant.

The tests run in a jail of their own and reach the source in another by plain values, so that they can tell
right from wrong by behaviour alone: text, syntax tree and bytecode are out of their reach. Each source is
tried twice, in an order that the tests do not know; tests that contradict themselves earn nothing.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from contextlib import closing
from typing import Literal

from nano_coder.grading.cases import Outcome
from nano_coder.grading.two_jail_suite import Job, NeedsStrict, TestsFailed, run_suite
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError
from nano_shared.types import HiddenChecks, Limits, Suite, Tampering, Task

Framework = Literal["script", "unittest", "pytest"]

REFERENCE = "reference"
_ROUNDS = 2


def run_mutants(task: Task, hidden: HiddenChecks, files: Mapping[str, bytes], sandbox: Sandbox) -> Outcome:
    """Checks: `reference`, and `killed_NAME` for each mutant. Raises SandboxError where a jail fails."""
    names = [f"killed_{name}" for name in hidden.mutants]
    tests = {name: data.decode("utf-8", "replace") for name, data in files.items()}
    suite = Suite(framework=_framework(tests), files=tests)
    first = _passes(task, hidden, suite, str(hidden.reference), sandbox)
    if not first:
        return Outcome({REFERENCE: "fail", **dict.fromkeys(names, "error")}, (), "fails_on_reference")
    runs = [(REFERENCE, str(hidden.reference)), *hidden.mutants.items()] * _ROUNDS
    random.Random(secrets.randbits(64)).shuffle(runs)
    told: dict[str, set[bool]] = {}
    for name, source in runs:
        told.setdefault(name, set()).add(_passes(task, hidden, suite, source, sandbox))
    checks = {REFERENCE: "pass" if told[REFERENCE] == {True} else "fail"}
    checks |= {f"killed_{name}": "pass" if told[name] == {False} else "fail" for name in hidden.mutants}
    undecided = sorted(name for name, seen in told.items() if len(seen) > 1)
    if undecided:
        found = Tampering(kind="flaky", detail=f"the tests pass and fail on the same source: {undecided[0]}")
        return Outcome(checks, (found,), "flaky")
    return Outcome(checks)


def killed(outcome: Outcome) -> float:
    """Fraction of the mutants that the tests found; 0 where they fail on the reference."""
    if outcome.checks[REFERENCE] != "pass":
        return 0.0
    found = [state == "pass" for name, state in outcome.checks.items() if name != REFERENCE]
    return sum(found) / len(found)


def _passes(task: Task, hidden: HiddenChecks, suite: Suite, source: str, sandbox: Sandbox) -> bool:
    """Whether at least one test ran and all passed. Tests that break their own jail do not pass."""
    module = str(hidden.module)
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
