"""The suite: every check, in the order of the criteria's kinds, run on one subject."""

from __future__ import annotations

from collections.abc import Iterator

from nano_rl.conformance.adapter import Subject
from nano_rl.conformance.check import Check, Result, run_check
from nano_rl.conformance.closed_forms import closed_forms
from nano_rl.conformance.derivatives import derivatives
from nano_rl.conformance.exact import exact_gradients
from nano_rl.conformance.exact_kl import exact_kl
from nano_rl.conformance.invariances import invariances
from nano_rl.conformance.stale import stale_samplers

KINDS = {
    "closed forms": closed_forms,
    "derivatives": derivatives,
    "invariances": invariances,
    "exact gradients": exact_gradients,
    "exact KL": exact_kl,
    "stale sampler": stale_samplers,
}


def checks() -> Iterator[tuple[str, Check]]:
    """(kind, check) of all."""
    for kind, make in KINDS.items():
        for check in make():
            yield kind, check


def run_suite(subject: Subject) -> Iterator[tuple[str, Result]]:
    """(kind, result) of every check, as they are done."""
    for kind, check in checks():
        yield kind, run_check(check, subject)
