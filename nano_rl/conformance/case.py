"""A case: rows of log-probs and advantages with their options, as a loss is asked about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nano_rl.conformance.adapter import SETTINGS, LossFunction
from nano_rl.objectives.config import ObjectiveConfig

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    logprobs: Tensor
    """[B, T], as all tensors here"""
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    options: Mapping[str, Any]

    def loss(self, function: LossFunction) -> Tensor:
        return function(
            self.logprobs, self.old, self.behaviour, self.reference, self.advantages, self.mask, self.options
        )

    def value(self, function: LossFunction) -> Tensor:
        return self.loss(function).detach()

    def gradient(self, function: LossFunction) -> Tensor:
        """[B, T] of the loss with respect to the log-probs."""
        x = self.logprobs.detach().clone().requires_grad_()
        loss = replace(self, logprobs=x).loss(function)
        if not loss.requires_grad:
            return torch.zeros_like(x)
        (gradient,) = torch.autograd.grad(loss, x, allow_unused=True)
        return torch.zeros_like(x) if gradient is None else gradient

    def rows(self, *indices: int) -> Case:
        """Some of the rows, with the step's own totals: a micro-batch."""
        of = list(indices)
        options = {
            **self.options,
            "trajectory": [self.options["trajectory"][i] for i in of],
            "trajectory_tokens": [self.options["trajectory_tokens"][i] for i in of],
        }
        tensors = {n: getattr(self, n)[of] for n in TENSORS}
        return Case(**tensors, options=options)

    def padded(self, columns: int, *, with_value: float) -> Case:
        """The same rows with untrained columns at their ends."""

        def pad(values: Tensor) -> Tensor:
            fill = False if values.dtype == torch.bool else with_value
            return torch.nn.functional.pad(values, (0, columns), value=fill)

        return Case(**{n: pad(getattr(self, n)) for n in TENSORS}, options=self.options)


TENSORS = ("logprobs", "old", "behaviour", "reference", "advantages", "mask")


def make_case(
    logprobs: Rows,
    advantages: Rows,
    *,
    old: Rows | None = None,
    behaviour: Rows | None = None,
    reference: Rows | None = None,
    trajectory: Sequence[str] | None = None,
    **settings: Any,
) -> Case:
    """A whole step from ragged rows. `old` is by default the policy itself, `behaviour` is `old`, and
    importance weights are off."""
    old = logprobs if old is None else old
    names = list(trajectory or map(str, range(len(logprobs))))
    width = max(map(len, logprobs), default=0)

    def pad(rows: Rows) -> Tensor:
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)

    tokens: Counter[str] = Counter()
    for name, row in zip(names, logprobs, strict=True):
        tokens[name] += len(row)
    config = ObjectiveConfig(**{"tis_cap": None, **settings}).model_dump(include=set(SETTINGS))
    return Case(
        logprobs=pad(logprobs),
        old=pad(old),
        behaviour=pad(old if behaviour is None else behaviour),
        reference=pad(logprobs if reference is None else reference),
        advantages=pad(advantages),
        mask=pad([[1.0] * len(row) for row in logprobs]).bool(),
        options={
            **config,
            "num_tokens": tokens.total(),
            "num_sequences": sum(n > 0 for n in tokens.values()),
            "trajectory": names,
            "trajectory_tokens": [tokens[name] for name in names],
        },
    )
