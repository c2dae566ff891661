"""The suite: every check, in the order of the criteria's kinds, run on one subject."""

from __future__ import annotations

from collections.abc import Iterator

from nano_rl.conformance.adapter import Subject
from nano_rl.conformance.case import Check, Result, run_check
from nano_rl.conformance.closed_forms import closed_forms
from nano_rl.conformance.credit import credit
from nano_rl.conformance.exact import exact_gradients
from nano_rl.conformance.exact_kl import exact_kl
from nano_rl.conformance.grid import grid
from nano_rl.conformance.invariances import invariances
from nano_rl.conformance.stale import stale_samplers

KINDS = {
    "closed forms": closed_forms,
    "grid": grid,
    "credit": credit,
    "invariances": invariances,
    "exact gradients": exact_gradients,
    "exact KL": exact_kl,
    "stale sampler": stale_samplers,
}


NOT_COVERED = (
    "the shift that gives each token its own log-prob, the making of masks and rows, temperature, padding of"
    " the model's input, the entropy bonus, punishment of length, baselines over time, and metrics"
)
"""what a loss may still have wrong that passes; our tests of these stand in docs/correctness.md"""


def checks(draw: int = 0) -> Iterator[tuple[str, Check]]:
    """(kind, check) of all; another draw has other rows."""
    for kind, make in KINDS.items():
        for check in make(draw):
            yield kind, check


def run_suite(subject: Subject) -> Iterator[tuple[str, Result]]:
    """(kind, result) of every check, as they are done."""
    for kind, check in checks():
        yield kind, run_check(check, subject)
