"""Scores and gradients of the head equal those of full logits, however cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nano_rl.learn.logprob import Targets, selected_scores

SITES, WIDTH, VOCABULARY = 7, 5, 11
SITE_N = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 6, 6])
GENERATOR = torch.Generator().manual_seed(0)
IDS_N = torch.randint(0, VOCABULARY, SITE_N.shape, generator=GENERATOR)
TEMPERATURE_S = torch.tensor([1, 0.6, 1, 1, 1, 2, 1], dtype=torch.float64)
WEIGHT_N = torch.randn(SITE_N.shape, generator=GENERATOR, dtype=torch.float64)
TARGETS = Targets(site_N=SITE_N, ids_N=IDS_N, temperature_S=TEMPERATURE_S)


def parts() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, VOCABULARY).double()
    return linear, torch.randn(SITES, WIDTH, dtype=torch.float64, requires_grad=True)


def naive(linear: nn.Linear, hidden_SH: Tensor) -> tuple[Tensor, Tensor]:
    logs_SV = (linear(hidden_SH) / TEMPERATURE_S[:, None]).log_softmax(-1)
    return logs_SV[SITE_N, IDS_N], -(logs_SV.exp() * logs_SV).sum(-1)[SITE_N]


def loss(logprobs_N: Tensor, entropy_N: Tensor, bonus: float = 0.0) -> Tensor:
    return (WEIGHT_N * logprobs_N.exp()).sum() + bonus * (WEIGHT_N.square() * entropy_N).sum()


@pytest.mark.parametrize("bonus", [0.0, 0.3])
@pytest.mark.parametrize("chunk_tokens", [2, 3, 100])
def test_scores_and_gradients_equal_full_logits(bonus: float, chunk_tokens: int) -> None:
    linear, hidden_SH = parts()
    inputs = hidden_SH, linear.weight, linear.bias
    scores = selected_scores(
        linear, hidden_SH, TARGETS, chunk_tokens=chunk_tokens, entropy_gradient=bonus > 0
    )
    expected = naive(linear, hidden_SH)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    actual = torch.autograd.grad(loss(*scores, bonus), inputs)
    torch.testing.assert_close(
        actual, torch.autograd.grad(loss(*expected, bonus), inputs), rtol=0, atol=1e-12
    )


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    linear, hidden_SH = parts()
    linear.requires_grad_(False)
    loss(*selected_scores(linear, hidden_SH, TARGETS)).backward()
    assert linear.weight.grad is None
    expected = torch.autograd.grad(loss(*naive(linear, hidden_SH)), hidden_SH)
    torch.testing.assert_close(hidden_SH.grad, expected[0], rtol=0, atol=1e-12)


def test_no_logits_wait_for_the_backward_pass() -> None:
    linear, hidden_SH = parts()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[-1] if tensor.ndim else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selected_scores(linear, hidden_SH, TARGETS)
    # hidden states, weight and bias alone: the bias is as wide as the vocabulary
    assert sorted(kept) == [WIDTH, WIDTH, VOCABULARY]
