"""Cases (rows of log-probs and advantages with options) and checks, which run a loss on them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from nano_conformance.adapter import LossFunction, Subject, settings_of


class Status(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_OFFERED = "not offered"


Numbers = Tensor | Sequence[float]
Compared = tuple[Numbers, Numbers]
"""expected and actual numbers"""
Run = Callable[[Subject], Compared]
RAISED = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""exceptions of a loss that count as a failure"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCheck:
    criterion: str
    """of docs/correctness.md"""
    name: str
    run: Run | Sequence[tuple[str, Run]]
    """one case, or several with their names"""
    tolerance: float = 1e-9
    """largest absolute difference"""
    note: str = ""
    """explanation of the numbers, where the definition has a bias"""
    where: Callable[[list[int]], str] = "at {}".format
    """names a position in the compared numbers"""

    @property
    def cases(self) -> Sequence[tuple[str, Run]]:
        return [("", self.run)] if callable(self.run) else self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    criterion: str
    name: str
    status: Status
    error: float | None
    """largest absolute difference; None if the loss raised"""
    tolerance: float
    note: str
    """if it failed: the case with expected and actual number, in one line"""
    compared: int
    """number of supported cases, up to the first failure"""


def run_check(check: ConformanceCheck, subject: Subject) -> CheckResult:
    """Run every case that the loss supports, up to the first failure."""
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
    return CheckResult(
        criterion=check.criterion, name=check.name, status=status, error=worst, tolerance=check.tolerance,
        note=note, compared=compared,
    )  # fmt: skip


def _compare(expected: Tensor, actual: Tensor, check: ConformanceCheck) -> tuple[float, str]:
    """(largest difference, a sentence about it if it exceeds the tolerance, else empty)."""
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


Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossCase:
    logprobs: Tensor
    """[B, T], as all tensors here"""
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    options: Mapping[str, Any]

    def loss(self, function: LossFunction) -> Tensor:
        # copies, for a loss may change in place what it is given
        others = (self.old, self.behaviour, self.reference, self.advantages, self.mask)
        old, behaviour, reference, advantages, mask = (tensor.clone() for tensor in others)
        return function(self.logprobs, old, behaviour, reference, advantages, mask, dict(self.options))

    def value(self, function: LossFunction) -> Tensor:
        return self.loss(function).detach()

    def gradient(self, function: LossFunction) -> Tensor:
        """[B, T] gradient of the loss by the log-probs."""
        return self.both(function)[1]

    def both(self, function: LossFunction) -> tuple[Tensor, Tensor]:
        """The value, and the gradient."""
        x = self.logprobs.detach().clone().requires_grad_()
        loss = replace(self, logprobs=x).loss(function)
        if not loss.requires_grad:
            return loss, torch.zeros_like(x)
        (gradient,) = torch.autograd.grad(loss, x, allow_unused=True)
        return loss.detach(), torch.zeros_like(x) if gradient is None else gradient

    def under(self, **settings: Any) -> LossCase:
        """The same rows under other settings; without importance weights by default."""
        return replace(self, options={**self.options, **settings_of(**settings)})

    def rows(self, *indices: int) -> LossCase:
        """A micro-batch: some of the rows, with the totals of the step."""
        of = list(indices)
        options = {
            **self.options,
            "trajectory": [self.options["trajectory"][i] for i in of],
            "trajectory_tokens": [self.options["trajectory_tokens"][i] for i in of],
        }
        tensors = {n: getattr(self, n)[of] for n in TENSORS}
        return LossCase(**tensors, options=options)

    def padded(self, columns: int, *, with_value: float) -> LossCase:
        """The same rows padded with untrained columns; all untrained positions hold `with_value`."""

        def pad(values: Tensor) -> Tensor:
            if values.dtype == torch.bool:
                return torch.nn.functional.pad(values, (0, columns), value=False)
            return torch.nn.functional.pad(
                values.masked_fill(~self.mask, with_value), (0, columns), value=with_value
            )

        return LossCase(**{n: pad(getattr(self, n)) for n in TENSORS}, options=self.options)


UNTRAINED = 3.7
"""value of untrained positions, which is no log-prob"""
TENSORS = ("logprobs", "old", "behaviour", "reference", "advantages", "mask")


def make_case(
    logprobs: Rows,
    advantages: Rows,
    *,
    old: Rows | None = None,
    behaviour: Rows | None = None,
    reference: Rows | None = None,
    trajectory: Sequence[str] | None = None,
    holes: Sequence[Collection[int]] | None = None,
    **settings: Any,
) -> LossCase:
    """A whole step from the trained tokens of ragged rows. By default `old` equals the policy, `behaviour`
    equals `old`, and importance weights are off. `holes` are the untrained columns of each row."""
    old = logprobs if old is None else old
    names = list(trajectory or map(str, range(len(logprobs))))
    columns = [
        _columns(len(row), untrained)
        for row, untrained in zip(logprobs, holes or [()] * len(names), strict=True)
    ]
    width = max((row[-1] + 1 for row in columns if row), default=0)

    def pad(rows: Rows, empty: float = UNTRAINED) -> Tensor:
        padded = torch.full((len(rows), width), empty, dtype=torch.float64)
        for b, (places, row) in enumerate(zip(columns, rows, strict=True)):
            padded[b, places] = torch.tensor(row, dtype=torch.float64)
        return padded

    tokens: Counter[str] = Counter()
    for name, row in zip(names, logprobs, strict=True):
        tokens[name] += len(row)
    case = LossCase(
        logprobs=pad(logprobs),
        old=pad(old),
        behaviour=pad(old if behaviour is None else behaviour),
        reference=pad(logprobs if reference is None else reference),
        advantages=pad(advantages),
        mask=pad([[1.0] * len(row) for row in logprobs], 0.0).bool(),
        options={
            "num_tokens": tokens.total(),
            "num_sequences": sum(n > 0 for n in tokens.values()),
            "trajectory": names,
            "trajectory_tokens": [tokens[name] for name in names],
        },
    )
    return case.under(**settings)


def _columns(length: int, holes: Collection[int]) -> list[int]:
    """The first `length` columns that are no holes."""
    return [t for t in range(length + len(holes)) if t not in holes][:length]
