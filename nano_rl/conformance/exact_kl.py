"""Exact gradients of the KL to the reference, for each estimator in the loss and in the reward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_rl.conformance.case import Check
from nano_rl.conformance.expectation import Language, beside, expected_ascent


def exact_kl(draw: int = 0) -> Iterator[Check]:
    yield from _one_token(Language(5, 1))
    yield from _sequences(Language(3, 3))


def _nothing(members: Sequence[int]) -> Tensor:
    return torch.zeros(len(members), dtype=torch.float64)


def _check(name: str, language: Language, expected: Tensor, note: str, **how: Any) -> Check:
    how = {"beta": 1.0, "aggregation": "constant", "constant_length": 1, **how}
    return Check(
        criterion="AC-24", name=name, note=note,
        run=lambda subject: (
            -expected, expected_ascent(language, subject, size=1, advantages=_nothing, **how)
        ),
    )  # fmt: skip


def _one_token(language: Language) -> Iterator[Check]:
    new, reference = (
        language.logprobs_ST(language.logits)[:, 0],
        language.logprobs_ST(language.reference)[:, 0],
    )
    reverse = language.gradient(language.divergence())
    forward = language.gradient((reference.exp() * (reference - new)).sum())
    squared = language.gradient((new.exp() * (new - reference).square() / 2).sum())
    yield _check("k1 in the loss", language, 0 * reverse, "nothing: the KL is not felt", kl="k1")
    yield _check("k2 in the loss", language, reverse, "the gradient of KL(policy || reference)", kl="k2")
    yield _check("k3+ in the loss", language, reverse, "the gradient of KL(policy || reference)", kl="k3+")
    away = f"that of KL(reference || policy): {beside(forward, reverse)}"
    yield _check("k3 in the loss", language, forward, away, kl="k3")
    yield _check(
        "k1 in the reward", language, reverse, "the gradient of KL(policy || reference)", kl="k1",
        kl_in="reward",
    )  # fmt: skip
    for kind, paid in (("k2", squared - reverse), ("k3", reverse - forward)):
        note = f"without the gradient of {kind} itself: {beside(paid, reverse)}"
        yield _check(f"{kind} in the reward", language, paid, note, kl=kind, kl_in="reward")


def _sequences(language: Language) -> Iterator[Check]:
    whole = language.gradient(language.divergence())
    yield _check(
        "k1 in the reward, sequences", language, whole, "the gradient of the KL of whole sequences", kl="k1",
        kl_in="reward",
    )  # fmt: skip
    new, reference = language.logits.log_softmax(-1), language.reference.log_softmax(-1)
    p_S = language.probabilities_S(language.logits).detach()
    reached = (language.prefix_ST[None] == torch.arange(len(new))[:, None, None]) & language.mask_ST
    mass_X = (reached.any(-1) * p_S).sum(-1)
    nearby = language.gradient((mass_X * (new.exp() * (new - reference)).sum(-1)).sum())
    note = f"the KL after each prefix, not what a token does to later prefixes: {beside(nearby, whole)}"
    for kind in ("k2", "k3+"):
        yield _check(f"{kind} in the loss, sequences", language, nearby, note, kl=kind)
