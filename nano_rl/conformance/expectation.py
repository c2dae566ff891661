"""Expectations: the mean gradient of a loss over everything that could be sampled, without sampling noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_rl.conformance.adapter import SETTINGS, Subject
from nano_rl.conformance.case import Case
from nano_rl.learn.config.objective import ObjectiveConfig

END = 0


class Language:
    """Policies with a logit for every token after every prefix; sequences stop at END or at the length."""

    def __init__(self, vocabulary: int, length: int, *, rewards: int = 3, seed: int = 0) -> None:
        """`rewards` is the number of distinct rewards: few, so that groups without variation occur."""
        full = itertools.product(range(vocabulary), repeat=length)
        self.sequences = sorted({s[: s.index(END) + 1] if END in s else s for s in full})
        prefixes = sorted({s[:i] for s in self.sequences for i in range(len(s))})
        place = {prefix: i for i, prefix in enumerate(prefixes)}
        random = torch.Generator().manual_seed(seed)

        def logits() -> Tensor:
            return torch.randn(len(prefixes), vocabulary, dtype=torch.float64, generator=random)

        self.logits = logits().requires_grad_()
        self.reference = logits()
        self.stale = self.logits.detach() + logits()
        """a policy some updates older"""
        self.rewards_S = torch.randint(0, rewards, (len(self.sequences),), generator=random).double()
        self.lengths_S = torch.tensor([len(s) for s in self.sequences])
        self.mask_ST = torch.arange(length) < self.lengths_S[:, None]
        padded = [[*s, *[END] * (length - len(s))] for s in self.sequences]
        self.tokens_ST = torch.tensor(padded)
        self.prefix_ST = torch.tensor([[place.get(s[:i], 0) for i in range(length)] for s in self.sequences])

    def logprobs_ST(self, logits: Tensor) -> Tensor:
        """[S, T] of each token of each sequence; 0 behind its end."""
        return logits.log_softmax(-1)[self.prefix_ST, self.tokens_ST] * self.mask_ST

    def probabilities_S(self, logits: Tensor) -> Tensor:
        return self.logprobs_ST(logits).sum(-1).exp()

    @property
    def expected_reward(self) -> Tensor:
        return (self.probabilities_S(self.logits) * self.rewards_S).sum()

    def divergence(self) -> Tensor:
        """KL(policy || reference) of whole sequences."""
        ratio_S = (self.logprobs_ST(self.logits) - self.logprobs_ST(self.reference)).sum(-1)
        return (self.probabilities_S(self.logits) * ratio_S).sum()

    def gradient(self, value: Tensor) -> Tensor:
        """[P] with respect to all logits of the policy."""
        (gradient,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient.flatten()

    def scores_STP(self) -> Tensor:
        """[S, T, P] the gradient of every token's log-prob."""
        jacobian: Tensor = torch.autograd.functional.jacobian(  # type: ignore[no-untyped-call]
            self.logprobs_ST, self.logits.detach()
        )
        return jacobian.flatten(2)

    def groups(self, size: int, logits: Tensor | None = None) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every ordered group of sequences, with its probability."""
        p = self.probabilities_S(self.logits if logits is None else logits).tolist()
        for members in itertools.product(range(len(p)), repeat=size):
            yield members, math.prod(p[i] for i in members)


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
