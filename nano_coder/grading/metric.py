"""Bounds on the solution's source, measured on its syntax tree in a jail of ours.

`statements` counts every statement but docstrings, and assignments and functions inside expressions;
`branches` the places where control may go two ways; `nesting` the deepest block; `lines` the lines of the
statements, one for each and for every hundred characters of it, however they are laid out. All files that
are graded count together; of `nesting`, the deepest counts. What runs text as code is refused, as far as
the source shows it, and by a hook in the process that runs the solution (`inside/watch.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from nano_coder.grading.cases import Outcome
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.errors import SandboxError
from nano_shared.types import Limits, Metric, Tampering

_MEASURE = Path(__file__).with_name("measure.py").read_text(encoding="utf-8")
_SECONDS = 20.0


def measure(files: Mapping[str, bytes], limits: Limits, sandbox: Sandbox) -> dict[str, int] | None:
    """The metrics of all Python files together, and how often they run code that is no syntax (`hidden`).

    None where a file is no Python. The source is parsed in a jail, since a parser may be crashed.
    Raises SandboxError where the jail fails.
    """
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


def keep_bounds(
    outcome: Outcome, bounds: tuple[Metric, ...], files: Mapping[str, bytes], limits: Limits, sandbox: Sandbox
) -> Outcome:
    """The outcome of the cases with a check for each bound. Code in strings is no way around one."""
    found = measure(files, limits, sandbox)
    checks = dict(outcome.checks)
    for bound in bounds:
        kept = found is not None and found[bound.name] <= bound.at_most
        checks[f"metric_{bound.name}"] = "pass" if kept else "error" if found is None else "fail"
    tampering = outcome.tampering
    if found is not None and found["hidden"] and "hidden_code" not in {told.kind for told in tampering}:
        detail = "the source runs code that no syntax tree shows, or reaches for what does"
        tampering = (*tampering, Tampering(kind="hidden_code", detail=detail))
    return Outcome(checks, tampering, outcome.failure_kind)
