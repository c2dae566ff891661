"""Scores and gradients of the head equal those of full logits, however cut and whatever is foreseen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nano_rl.learn.model import logprob_head as head
from nano_rl.learn.model.logprob_head import Anticipate, Targets, selected_scores

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


def loss_with(bonus: float) -> Anticipate:
    def loss(logprobs_n: Tensor, entropy_n: Tensor, tokens: slice) -> Tensor:
        weight_n = WEIGHT_N[tokens]
        return (weight_n * logprobs_n.exp()).sum() + bonus * (weight_n.square() * entropy_n).sum()

    return loss


def wrong(logprobs_n: Tensor, entropy_n: Tensor, tokens: slice) -> Tensor:
    return 2 * logprobs_n.sum()


@pytest.mark.parametrize("bonus", [0.0, 0.3])
@pytest.mark.parametrize("chunk_tokens", [2, 3, 100])
@pytest.mark.parametrize("foreseen", ["nothing", "right", "wrong"])
def test_scores_and_gradients_equal_full_logits(
    monkeypatch: pytest.MonkeyPatch, bonus: float, chunk_tokens: int, foreseen: str
) -> None:
    monkeypatch.setattr(head, "BLOCK_LOGITS", 2 * VOCABULARY)  # two sites a block
    linear, hidden_SH = parts()
    inputs = hidden_SH, linear.weight, linear.bias
    loss = loss_with(bonus)
    scores = selected_scores(
        linear, hidden_SH, TARGETS, chunk_tokens=chunk_tokens, entropy_gradient=bonus > 0,
        anticipate={"nothing": None, "right": loss, "wrong": wrong}[foreseen],
    )  # fmt: skip
    expected = naive(linear, hidden_SH)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    actual = torch.autograd.grad(loss(*scores, slice(None)), inputs)
    torch.testing.assert_close(
        actual, torch.autograd.grad(loss(*expected, slice(None)), inputs), rtol=0, atol=1e-12
    )


def test_a_right_foresight_needs_no_second_look_at_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = nn.functional.linear

    def counted(hidden: Tensor, *rest: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        return linear(hidden, *rest)

    monkeypatch.setattr(nn.functional, "linear", counted)
    for foresight, passes in ((loss_with(0.0), 1), (wrong, 2), (None, 2)):
        rows.clear()
        module, hidden_SH = parts()
        scores = selected_scores(module, hidden_SH, TARGETS, chunk_tokens=3, anticipate=foresight)
        loss_with(0.0)(*scores, slice(None)).backward()
        assert sum(rows) == passes * SITES
        assert max(rows) == 3


def test_a_second_backward_pass_gives_the_same() -> None:
    linear, hidden_SH = parts()
    scores = selected_scores(linear, hidden_SH, TARGETS, anticipate=loss_with(0.0))
    loss = loss_with(0.0)(*scores, slice(None))
    (first,) = torch.autograd.grad(loss, hidden_SH, retain_graph=True)
    (second,) = torch.autograd.grad(loss, hidden_SH)
    torch.testing.assert_close(second, first, rtol=0, atol=1e-14)


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    linear, hidden_SH = parts()
    linear.requires_grad_(False)
    scores = selected_scores(linear, hidden_SH, TARGETS, anticipate=loss_with(0.0))
    loss_with(0.0)(*scores, slice(None)).backward()
    assert linear.weight.grad is None
    expected = torch.autograd.grad(loss_with(0.0)(*naive(linear, hidden_SH), slice(None)), hidden_SH)
    torch.testing.assert_close(hidden_SH.grad, expected[0], rtol=0, atol=1e-12)


def test_no_logits_wait_for_the_backward_pass() -> None:
    linear, hidden_SH = parts()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape[-1])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        selected_scores(linear, hidden_SH, TARGETS)
    # hidden states, weight and bias alone: the bias is as wide as the vocabulary
    assert sorted(kept) == [WIDTH, WIDTH, VOCABULARY]
