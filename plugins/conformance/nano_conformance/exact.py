"""Exact gradients: the expected gradient of each objective, over all sequences of a small language.

The expectation of the loss's gradient, without sampling noise, is compared with sums over score functions
that use no loss. Some objectives are unbiased; for the others the bias is given by its size along the
gradient of the expected reward and a cosine. Also the gradients of the KL to the reference, for each
estimator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_conformance.adapter import Subject, settings_of
from nano_conformance.by_hand import advantages_by_hand
from nano_conformance.case import ConformanceCheck, LossCase

END = 0


class Language:
    """A tabular policy: a logit for every token after every prefix; sequences end at END or at the length."""

    def __init__(self, vocabulary: int, length: int, *, rewards: int = 3, seed: int = 0) -> None:
        """`rewards` is the number of distinct rewards; few, so that groups of equal rewards occur."""
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
        """[S, T] log-prob of each token of each sequence; 0 after its end."""
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
    """[P] minus the expected gradient of the loss over all groups, each a step of its own. `sampler` holds
    the logits that sequences are drawn from, `start` those of the policy at the start of the step; both are
    the policy itself by default."""
    new_ST = language.logprobs_ST(language.logits)
    reference_ST = language.logprobs_ST(language.reference)
    drawn = language.logits.detach() if sampler is None else sampler
    old_ST = new_ST.detach() if start is None else language.logprobs_ST(start)
    behaviour_ST = language.logprobs_ST(drawn)
    config = settings_of(**settings)
    objective = torch.zeros((), dtype=torch.float64)
    for members, probability in language.groups(size, drawn):
        rows = list(members)
        mask, of = language.mask_ST[rows], advantages(members)
        lengths = language.lengths_S[rows].tolist()
        case = LossCase(
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
    """Size of an expected gradient along the exact one, and the cosine between them, as text."""
    along = float((biased * exact).sum() / exact.square().sum())
    cosine = float((biased * exact).sum() / (biased.norm() * exact.norm()))
    return f"{along:.3f} of the exact gradient along it, cosine {cosine:.4f}"


def exact_kl(draw: int = 0) -> Iterator[ConformanceCheck]:
    yield from _one_token(Language(5, 1))
    yield from _sequences(Language(3, 3))


def _nothing(members: Sequence[int]) -> Tensor:
    return torch.zeros(len(members), dtype=torch.float64)


def _kl_check(name: str, language: Language, expected: Tensor, note: str, **how: Any) -> ConformanceCheck:
    how = {"beta": 1.0, "aggregation": "constant", "constant_length": 1, **how}
    return ConformanceCheck(
        criterion="AC-24", name=name, note=note,
        run=lambda subject: (
            -expected, expected_ascent(language, subject, size=1, advantages=_nothing, **how)
        ),
    )  # fmt: skip


def _one_token(language: Language) -> Iterator[ConformanceCheck]:
    new, reference = (
        language.logprobs_ST(language.logits)[:, 0],
        language.logprobs_ST(language.reference)[:, 0],
    )
    reverse = language.gradient(language.divergence())
    forward = language.gradient((reference.exp() * (reference - new)).sum())
    squared = language.gradient((new.exp() * (new - reference).square() / 2).sum())
    yield _kl_check("k1 in the loss", language, 0 * reverse, "nothing: the KL is not felt", kl="k1")
    yield _kl_check("k2 in the loss", language, reverse, "the gradient of KL(policy || reference)", kl="k2")
    yield _kl_check("k3+ in the loss", language, reverse, "the gradient of KL(policy || reference)", kl="k3+")
    away = f"that of KL(reference || policy): {beside(forward, reverse)}"
    yield _kl_check("k3 in the loss", language, forward, away, kl="k3")
    yield _kl_check(
        "k1 in the reward", language, reverse, "the gradient of KL(policy || reference)", kl="k1",
        kl_in="reward",
    )  # fmt: skip
    for kind, paid in (("k2", squared - reverse), ("k3", reverse - forward)):
        note = f"without the gradient of {kind} itself: {beside(paid, reverse)}"
        yield _kl_check(f"{kind} in the reward", language, paid, note, kl=kind, kl_in="reward")


def _sequences(language: Language) -> Iterator[ConformanceCheck]:
    whole = language.gradient(language.divergence())
    yield _kl_check(
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
        yield _kl_check(f"{kind} in the loss, sequences", language, nearby, note, kl=kind)


UNBIASED = {"reinforce": "none", "rloo": "rloo"}


def exact_gradients(draw: int = 0) -> Iterator[ConformanceCheck]:
    yield from _unbiased(Language(3, 3))
    yield from _deviation(Language(3, 2, rewards=2))
    yield from _means(Language(3, 2))


def compared(language: Language, baseline: str, std: str = "none") -> Any:
    """Group advantages, without an epsilon added to the deviation."""

    def advantages(members: Sequence[int]) -> Tensor:
        rewards = language.rewards_S[list(members)].tolist()
        return torch.tensor(advantages_by_hand(rewards, baseline, std), dtype=torch.float64)

    return advantages


def _check(
    name: str, language: Language, expected: Tensor, note: str, size: int = 2, **how: Any
) -> ConformanceCheck:
    return ConformanceCheck(
        criterion="exact", name=name, note=note,
        run=lambda subject: (expected, expected_ascent(language, subject, size=size, **how)),
    )  # fmt: skip


def _unbiased(language: Language) -> Iterator[ConformanceCheck]:
    exact = language.gradient(language.expected_reward)
    for objective, baseline in UNBIASED.items():
        advantages = compared(language, baseline)
        yield _check(objective, language, exact, "unbiased", objective=objective, advantages=advantages)
    note = "(G-1)/G of the exact gradient, for each rollout is in its own baseline; direction exact"
    mean: dict[str, Any] = {
        "objective": "dr_grpo",
        "constant_length": 1,
        "advantages": compared(language, "mean"),
    }
    yield _check("dr_grpo (L = 1)", language, exact / 2, note, **mean)
    values_ST = _prefix_values(language)

    def critic(members: Sequence[int]) -> Tensor:
        rows = list(members)
        return language.rewards_S[rows][:, None] - values_ST[rows]

    ppo: dict[str, Any] = {
        "objective": "ppo", "aggregation": "constant", "constant_length": 1, "advantages": critic,
    }  # fmt: skip
    yield _check("ppo, exact critic, constant mean", language, exact, "unbiased", **ppo)


def _prefix_values(language: Language) -> Tensor:
    """[S, T] the expected reward after the prefix before each token, the values of a perfect critic."""
    p_S = language.probabilities_S(language.logits).detach()
    reached = (
        language.prefix_ST[None] == torch.arange(len(language.logits))[:, None, None]
    ) & language.mask_ST
    mass_X = (reached.any(-1) * p_S).sum(-1)
    value_X = (reached.any(-1) * p_S * language.rewards_S).sum(-1) / mass_X
    return value_X[language.prefix_ST]


def _deviation(language: Language) -> Iterator[ConformanceCheck]:
    """With two rewards the division scales the gradient by a factor that depends on the success rate."""
    size, exact = 3, language.gradient(language.expected_reward)
    p = float(language.expected_reward.detach())
    spread = sum(
        math.comb(size, k) * p**k * (1 - p) ** (size - k) * math.sqrt(k * (size - k)) for k in range(size + 1)
    )
    factor = spread / (size * p * (1 - p))
    note = f"direction exact for two rewards; {factor:.3f} of its size at success {p:.2f}, near"
    note += " 1/sqrt(p(1-p)) in large groups: easy and hard tasks weigh more"
    yield _check(
        "division by the deviation", language, factor * exact, note, size=size, aggregation="constant",
        constant_length=1, advantages=compared(language, "mean", "population"),
    )  # fmt: skip


def _means(language: Language) -> Iterator[ConformanceCheck]:
    exact = language.gradient(language.expected_reward)
    scores_SP = language.scores_STP().sum(1)
    p_S = language.probabilities_S(language.logits).detach()
    shorter = p_S * (language.rewards_S - language.expected_reward.detach()) / language.lengths_S
    biased = (shorter[:, None] * scores_SP).sum(0)
    yield _check(
        "mean over sequences, rloo baseline", language, biased,
        f"short rollouts weigh more: {beside(biased, exact)}",
        aggregation="sequence", advantages=compared(language, "rloo"),
    )  # fmt: skip
    for objective, std, mean in (
        ("recipe", "none", "token"), ("grpo", "sample", "sequence"), ("dapo", "sample", "token"),
        ("gspo", "sample", "sequence"), ("cispo", "sample", "token"), ("ppo", "none", "token"),
    ):  # fmt: skip
        advantages = compared(language, "mean", std)
        biased = torch.zeros_like(exact)
        for members, probability in language.groups(2):
            rows = list(members)
            lengths = language.lengths_S[rows].double()
            shares = (1 / lengths.sum()).expand(2) if mean == "token" else 1 / (2 * lengths)
            biased += probability * ((shares * advantages(members))[:, None] * scores_SP[rows]).sum(0)
        note = f"mean over {mean}s" + (", divided by the deviation" if std != "none" else "")
        settings: dict[str, Any] = {"objective": objective, "beta": 0.0}
        yield _check(
            objective, language, biased, f"{note}: {beside(biased, exact)}", advantages=advantages, **settings
        )
