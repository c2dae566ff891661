"""Expectations: the mean gradient of a loss over everything that could be sampled, without sampling noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_rl.conformance.adapter import SETTINGS, Subject
from nano_rl.conformance.case import Case
from nano_rl.conformance.language import Language
from nano_rl.objectives.config import ObjectiveConfig

Advantages = Callable[[Sequence[int]], Tensor]
"""members of a group -> [G] or [G, T] advantages"""


def expected_ascent(
    language: Language,
    subject: Subject,
    *,
    size: int,
    advantages: Advantages,
    sampler: Tensor | None = None,
    start: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """[P] minus the expected gradient of the loss over all groups, each a step of its own.

    `sampler` holds the logits that sequences are drawn from, `start` those of the policy at the start of the
    step; both are the policy itself by default.
    """
    new_ST = language.logprobs_ST(language.logits)
    reference_ST = language.logprobs_ST(language.reference)
    drawn = language.logits.detach() if sampler is None else sampler
    old_ST = new_ST.detach() if start is None else language.logprobs_ST(start)
    behaviour_ST = language.logprobs_ST(drawn)
    config = ObjectiveConfig(**{"tis_cap": None, **settings}).model_dump(include=set(SETTINGS))
    objective = torch.zeros((), dtype=torch.float64)
    for members, probability in language.groups(size, drawn):
        rows = list(members)
        mask, of = language.mask_ST[rows], advantages(members)
        lengths = language.lengths_S[rows].tolist()
        case = Case(
            logprobs=new_ST[rows], old=old_ST[rows], behaviour=behaviour_ST[rows],
            reference=reference_ST[rows], advantages=(of if of.dim() == 2 else of[:, None]) * mask, mask=mask,
            options={
                **config, "num_tokens": sum(lengths), "num_sequences": size,
                "trajectory": [str(i) for i in range(size)], "trajectory_tokens": lengths,
            },
        )  # fmt: skip
        objective = objective - probability * case.loss(subject.loss)
    return language.gradient(objective)


def beside(biased: Tensor, exact: Tensor) -> str:
    """How an expected gradient lies to the exact one: its size along it, and the angle between them."""
    along = float((biased * exact).sum() / exact.square().sum())
    cosine = float((biased * exact).sum() / (biased.norm() * exact.norm()))
    return f"{along:.3f} of the exact gradient along it, cosine {cosine:.4f}"
