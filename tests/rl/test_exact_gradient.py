"""The exact-gradient oracle: every sequence of a tiny language enumerated, no sampling noise at all.

E[gradient of our loss] over all groups that could be drawn is compared with the gradient of the expected
reward, or of the exact divergence, to 1e-9 in float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from builders import flat_batch, terms
from torch import Tensor

from nano_rl.learn.advantages import group_advantages
from nano_rl.learn.loss import policy_loss, reference_kl
from nano_rl.learn.objectives import KL, Baseline

END = 0


def sequences(vocabulary: int, length: int) -> list[tuple[int, ...]]:
    """All sequences that stop at END or at the length."""
    full = itertools.product(range(vocabulary), repeat=length)
    return sorted({s[: s.index(END) + 1] if END in s else s for s in full})


class Language:
    """A policy with free logits after every prefix, and a reward for each whole sequence."""

    def __init__(self, vocabulary: int, length: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.sequences = sequences(vocabulary, length)
        prefixes = sorted({s[:i] for s in self.sequences for i in range(len(s))})
        self.index = {prefix: i for i, prefix in enumerate(prefixes)}
        self.logits = torch.randn(len(prefixes), vocabulary, dtype=torch.float64, requires_grad=True)
        self.reference = torch.randn(len(prefixes), vocabulary, dtype=torch.float64)
        # few distinct values, so that groups without variation occur
        self.rewards = torch.randint(0, 3, (len(self.sequences),)).double()

    def tokens(self, sequence: tuple[int, ...], logits: Tensor | None = None) -> Tensor:
        """[L] log-probs of the tokens of a sequence."""
        table = (self.logits if logits is None else logits).log_softmax(-1)
        return torch.stack([table[self.index[sequence[:i]], token] for i, token in enumerate(sequence)])

    def probabilities(self) -> Tensor:
        return torch.stack([self.tokens(s).sum() for s in self.sequences]).exp()

    def gradient(self, value: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value, self.logits, retain_graph=True)
        return gradient

    def groups(self, size: int) -> Iterator[tuple[tuple[int, ...], float]]:
        """Every ordered group of sequence indices, with its probability."""
        p = self.probabilities().tolist()
        for members in itertools.product(range(len(self.sequences)), repeat=size):
            yield members, math.prod(p[i] for i in members)


def expected_gradient(language: Language, size: int, baseline: Baseline) -> Tensor:
    """E over groups of the gradient of `policy_loss` at its first update, negated: an ascent direction."""
    tokens = [language.tokens(s) for s in language.sequences]
    objective = torch.zeros((), dtype=torch.float64)
    for members, probability in language.groups(size):
        advantages = group_advantages([language.rewards[i].item() for i in members], baseline=baseline)
        new = torch.cat([tokens[i] for i in members])
        spread = [a for i, a in zip(members, advantages, strict=True) for _ in tokens[i]]
        # a constant denominator: a random number of tokens below the sum would weigh short groups more
        batch = flat_batch(spread, behaviour=new.tolist(), num_action_tokens=size)
        padded = torch.cat([torch.zeros(1, dtype=torch.float64), new])[None]
        loss, _ = policy_loss(padded, batch, terms())
        objective = objective - probability * loss
    return language.gradient(objective)


@pytest.mark.some(4)
@pytest.mark.parametrize(("vocabulary", "length", "size"), [(3, 3, 2), (4, 2, 2), (2, 3, 3)])
@pytest.mark.parametrize("baseline", ["mean", "rloo", "none"])
def test_expected_gradient_is_that_of_the_expected_reward(
    vocabulary: int, length: int, size: int, baseline: Baseline
) -> None:
    language = Language(vocabulary, length)
    exact = language.gradient((language.probabilities() * language.rewards).sum())
    # RLOO and REINFORCE are unbiased; the group mean contains the rollout itself, which scales by (G-1)/G
    scale = (size - 1) / size if baseline == "mean" else 1.0
    assert exact.abs().max() > 1e-2
    torch.testing.assert_close(expected_gradient(language, size, baseline), scale * exact, rtol=0, atol=1e-9)


def test_dividing_by_the_deviation_is_biased() -> None:
    """Negative control: the same comparison fails where theory says that it must."""
    language = Language(3, 2)
    exact = language.gradient((language.probabilities() * language.rewards).sum())
    coefficients = torch.zeros(len(language.sequences), dtype=torch.float64)
    for members, probability in language.groups(3):
        rewards = [language.rewards[i].item() for i in members]
        for i, a in zip(members, group_advantages(rewards, std="sample"), strict=True):
            coefficients[i] += probability * a / 3
    logprobs = torch.stack([language.tokens(s).sum() for s in language.sequences])
    biased = language.gradient((coefficients * logprobs).sum())
    best_scale = (biased * exact).sum() / exact.square().sum()
    assert (biased - best_scale * exact).abs().max() > 1e-3


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize(("kind", "target"), [("k1", "nothing"), ("k2", "reverse"), ("k3", "forward")])
def test_ac_24_expected_gradient_of_each_kl_as_a_loss(kind: KL, target: str) -> None:
    """On-policy, one token: k1's gradient vanishes, k2's is the reverse KL's, k3's the forward KL's."""
    language = Language(4, 1)
    new, reference = language.logits[0].log_softmax(-1), language.reference[0].log_softmax(-1)
    exact = {
        "nothing": 0 * new.sum(),
        "reverse": divergence(new, reference),
        "forward": divergence(reference, new),
    }[target]
    loss = (new.detach().exp() * reference_kl(new, reference, kind)).sum()
    torch.testing.assert_close(language.gradient(loss), language.gradient(exact), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_ac_24_expected_value_of_each_kl(kind: KL, unbiased: bool) -> None:
    language = Language(4, 1)
    new, reference = language.logits[0].log_softmax(-1), language.reference[0].log_softmax(-1)
    mean = (new.exp() * reference_kl(new, reference, kind)).sum()
    error = (mean - divergence(new, reference)).abs().item()
    assert (error < 1e-9) is unbiased
