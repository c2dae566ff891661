"""Exact gradients: on-policy, the expected gradient of each objective, unbiased or with its bias stated.

The expectation of the loss's own gradient is compared with sums over scores that use no loss at all. The
gradient of the expected reward is called exact; a bias is given as its size along it and as a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nano_rl.conformance.by_hand import advantages_by_hand
from nano_rl.conformance.case import Check
from nano_rl.conformance.expectation import Language, beside, expected_ascent

UNBIASED = {"reinforce": "none", "rloo": "rloo"}


def exact_gradients(draw: int = 0) -> Iterator[Check]:
    yield from _unbiased(Language(3, 3))
    yield from _deviation(Language(3, 2, rewards=2))
    yield from _means(Language(3, 2))


def compared(language: Language, baseline: str, std: str = "none") -> Any:
    """Group advantages, with nothing beside the deviation."""

    def advantages(members: Sequence[int]) -> Tensor:
        rewards = language.rewards_S[list(members)].tolist()
        return torch.tensor(advantages_by_hand(rewards, baseline, std), dtype=torch.float64)

    return advantages


def _check(name: str, language: Language, expected: Tensor, note: str, size: int = 2, **how: Any) -> Check:
    return Check(
        criterion="exact", name=name, note=note,
        run=lambda subject: (expected, expected_ascent(language, subject, size=size, **how)),
    )  # fmt: skip


def _unbiased(language: Language) -> Iterator[Check]:
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
        "objective": "ppo",
        "aggregation": "constant",
        "constant_length": 1,
        "advantages": critic,
    }
    yield _check("ppo, exact critic, constant mean", language, exact, "unbiased", **ppo)


def _prefix_values(language: Language) -> Tensor:
    """[S, T] the expected reward after the prefix before each token: what a perfect critic says."""
    p_S = language.probabilities_S(language.logits).detach()
    reached = (
        language.prefix_ST[None] == torch.arange(len(language.logits))[:, None, None]
    ) & language.mask_ST
    mass_X = (reached.any(-1) * p_S).sum(-1)
    value_X = (reached.any(-1) * p_S * language.rewards_S).sum(-1) / mass_X
    return value_X[language.prefix_ST]


def _deviation(language: Language) -> Iterator[Check]:
    """With two rewards the division changes the size alone, by a factor of the success rate."""
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


def _means(language: Language) -> Iterator[Check]:
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
