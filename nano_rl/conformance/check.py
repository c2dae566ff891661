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
Run = Callable[[Subject], Compared]
RAISED = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""what a loss may raise that counts as its failure"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    criterion: str
    """of docs/correctness.md"""
    name: str
    run: Run | Sequence[tuple[str, Run]]
    """one case, or several, each with what it is called"""
    tolerance: float = 1e-9
    """largest absolute difference"""
    note: str = ""
    """what the numbers mean, where they are a bias that the definition has"""
    where: Callable[[list[int]], str] = "at {}".format
    """what stands at a place of what is compared"""

    @property
    def cases(self) -> Sequence[tuple[str, Run]]:
        return [("", self.run)] if callable(self.run) else self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    criterion: str
    name: str
    status: Status
    error: float | None
    """largest absolute difference; None where nothing came out"""
    tolerance: float
    note: str
    """where it failed: the case, what was expected and what came out, in one line"""
    compared: int
    """cases that the loss offers, up to the first that failed"""


def run_check(check: Check, subject: Subject) -> Result:
    """Every case that the loss offers, up to the first failure; one that raises fails in its own words."""
    status, note, compared = Status.NOT_OFFERED, check.note, 0
    worst: float | None = None
    for case, run in check.cases:
        try:
            expected, actual = (torch.as_tensor(v, dtype=torch.float64) for v in run(subject))
            error: float | None
            error, problem = _compare(expected, actual, check)
        except NotImplementedError:
            continue
        except RAISED as raised:
            error, problem = None, f"{type(raised).__name__}: {raised}"
        compared += 1
        if problem:
            note = f"{case}: {problem}" if case else problem
            status, worst = Status.FAILED, error
            break
        status, worst = Status.PASSED, max(worst or 0.0, error or 0.0)
    return Result(
        criterion=check.criterion, name=check.name, status=status, error=worst, tolerance=check.tolerance,
        note=note, compared=compared,
    )  # fmt: skip


def _compare(expected: Tensor, actual: Tensor, check: Check) -> tuple[float, str]:
    """The largest difference, and where it is above the tolerance a sentence that shows it."""
    if expected.shape != actual.shape:
        return math.inf, f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    gap = (expected - actual).abs()
    error = float(gap.max())
    if error <= check.tolerance:  # false for NaN
        return error, ""
    # an infinite difference is shown before a finite one, and NaN before both
    place = int(gap.nan_to_num(nan=math.inf).argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(place), gap.shape)]
    where = f"{check.where(at)}: " if gap.numel() > 1 else ""
    return error, f"{where}expected {expected.flatten()[place]:.6g}, got {actual.flatten()[place]:.6g}"
