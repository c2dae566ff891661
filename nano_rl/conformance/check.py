"""A check: what must come out, what did, and how far apart they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from nano_rl.conformance.adapter import Subject


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_OFFERED = "not offered"


Numbers = Tensor | Sequence[float]
Compared = tuple[Numbers, Numbers]
"""what must come out, and what did"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    criterion: str
    """of docs/correctness.md"""
    name: str
    run: Callable[[Subject], Compared]
    tolerance: float = 1e-9
    """largest absolute difference"""
    note: str = ""
    """what the numbers mean, where they are a bias that the definition has"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    criterion: str
    name: str
    status: Status
    error: float | None
    """largest absolute difference; None where nothing came out"""
    tolerance: float
    note: str


def run_check(check: Check, subject: Subject) -> Result:
    """A loss that raises on what it does offer has failed, with its own words as the note."""
    status, error, note = Status.NOT_OFFERED, None, check.note
    try:
        expected, actual = (torch.as_tensor(v, dtype=torch.float64) for v in check.run(subject))
        error = float((expected - actual).abs().max()) if expected.shape == actual.shape else math.inf
        # written so that NaN fails
        status = Status.PASSED if error <= check.tolerance else Status.FAILED
    except NotImplementedError:
        pass
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as problem:
        status, note = Status.FAILED, f"{type(problem).__name__}: {problem}"
    return Result(
        criterion=check.criterion, name=check.name, status=status, error=error, tolerance=check.tolerance,
        note=note,
    )  # fmt: skip
