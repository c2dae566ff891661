"""The conformance suite: all checks by kind, and running them on a subject."""

from __future__ import annotations

from collections.abc import Iterator

from nano_conformance.adapter import Subject
from nano_conformance.case import CheckResult, ConformanceCheck, run_check
from nano_conformance.closed_forms import closed_forms
from nano_conformance.credit import credit
from nano_conformance.exact import exact_gradients, exact_kl
from nano_conformance.grid import grid
from nano_conformance.invariances import invariances, stale_samplers

KINDS = {
    "closed forms": closed_forms, "grid": grid, "credit": credit, "invariances": invariances,
    "exact gradients": exact_gradients, "exact KL": exact_kl, "stale sampler": stale_samplers,
}  # fmt: skip


NOT_COVERED = (
    "the shift that gives each token its own log-prob, the making of masks and rows, temperature, padding of"
    " the model's input, the entropy bonus, punishment of length, baselines over time, and metrics"
)
"""errors that the suite cannot find; nano's own tests of these are listed in docs/correctness.md"""


def checks(draw: int = 0) -> Iterator[tuple[str, ConformanceCheck]]:
    """(kind, check) of all checks; another `draw` has other random rows."""
    for kind, make in KINDS.items():
        for check in make(draw):
            yield kind, check


def run_suite(subject: Subject) -> Iterator[tuple[str, CheckResult]]:
    """(kind, result) of every check, one after the other."""
    for kind, check in checks():
        yield kind, run_check(check, subject)
