"""Hidden cases with bounds on the solution's source (`metrics`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from nano_coder.grading.hidden_cases import GradingOutcome, Submission, run_cases
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError
from nano_shared.hidden_checks import CaseChecks
from nano_shared.types import Limits, Tampering
from nano_suites.checks.source_measure import MODULES

_MEASURE = Path(__file__).with_name("source_measure.py").read_text(encoding="utf-8")
_SECONDS = 20.0


def measure(files: Mapping[str, bytes], limits: Limits, sandbox: Sandbox) -> dict[str, int] | None:
    """The metrics of all Python files together, and the number of ways to run code that the syntax tree hides
    (`hidden`). None if a file is not valid Python. The source is parsed in a jail, since it may crash the
    parser. Raises SandboxError if the jail fails."""
    texts = {
        name: data.decode("utf-8", "surrogateescape") for name, data in files.items() if name.endswith(".py")
    }
    with closing(sandbox.open(None, limits)) as jail:
        result = jail.run_python(_MEASURE, isolated=True, stdin=json.dumps(texts).encode(), timeout=_SECONDS)
    try:
        found = json.loads(result.stdout)
    except ValueError:
        if result.signal is None and not result.timed_out:
            raise SandboxError(f"the source was not measured: {result.stderr[-300:]!r}") from None
        return None  # it crashed the parser
    return {str(name): int(value) for name, value in found.items()} if found is not None else None


def grade_measured(given: Submission) -> GradingOutcome:
    """Hidden cases with a check for each bound on a metric; code hidden in strings is tampering."""
    hidden = given.checks
    assert isinstance(hidden, CaseChecks)
    outcome = run_cases(given, MODULES)
    found = measure(given.files, given.task.limits, given.sandbox)
    checks = dict(outcome.checks)
    for bound in hidden.metrics:
        kept = found is not None and found[bound.name] <= bound.at_most
        checks[f"metric_{bound.name}"] = "pass" if kept else "error" if found is None else "fail"
    tampering = outcome.tampering
    if found is not None and found["hidden"] and "hidden_code" not in {finding.kind for finding in tampering}:
        detail = "the source runs code that no syntax tree shows, or reaches for what does"
        tampering = (*tampering, Tampering(kind="hidden_code", detail=detail))
    return GradingOutcome(checks, tampering, outcome.failure_kind)
