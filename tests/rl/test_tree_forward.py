"""AC-29: scores along the tree equal those of rows on their own, in value and gradient, on real families."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from builders import terms, tiny_llama
from families import FAMILIES, adapted, family, forking_rows, one_batch, sample
from hypothesis import given, settings
from torch import Tensor, nn

from nano_rl.learn.batch import Batch
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.logprob import TokenScores, can_share, score_tokens, tree_hidden
from nano_rl.learn.prefix_tree import build_tree

shared_model = cache(family)
CONFIG = terms(beta=0.1)


def alone(model: nn.Module, samples: list[TrainSample], batch: Batch) -> tuple[Tensor, Tensor]:
    """[B, T] log-probs and entropies by the textbook: each row on its own, all logits, softmax, gather."""
    logprobs_BT, entropy_BT = [], []
    width = batch.ids_BT.shape[1]
    for run_id in batch.run_ids:
        (row,) = [s for s in samples if s.run_id == run_id]
        logits = model(input_ids=torch.tensor([row.ids])).logits[0] / row.temperature
        logs = logits.log_softmax(-1)[:-1]
        mask = torch.tensor(row.mask[1:], dtype=logs.dtype)
        padding = (1, width - len(row.ids))
        picked = logs.gather(1, torch.tensor(row.ids[1:])[:, None])[:, 0] if len(row.ids) > 1 else logs[:, 0]
        logprobs_BT.append(nn.functional.pad(picked * mask, padding))
        entropy_BT.append(nn.functional.pad(-(logs.exp() * logs).sum(-1) * mask, padding))
    return torch.stack(logprobs_BT), torch.stack(entropy_BT)


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [torch.zeros(p.numel()) if g is None else g.flatten() for g, p in zip(found, parameters, strict=True)]
    )


def assert_close(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Relative to the largest value: single entries may cancel to nothing. Where a token is all but sure, the
    whole gradient does, and in float32 the rounding of what it cancels from stays."""
    least = 1e-6 if relative < 1e-7 else 0.1
    scale = max(float(expected.detach().abs().max()), least) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=relative * scale, check_dtype=False)


def equal_to_rows(model: nn.Module, samples: list[TrainSample], dtype: torch.dtype, relative: float) -> None:
    assert can_share(model)
    batch = one_batch(samples, dtype)
    scores = score_tokens(model, batch, entropy_gradient=True)
    logprobs_BT, entropy_BT = alone(model, samples, batch)
    assert_close(scores.logprobs_BT, logprobs_BT, relative)
    assert_close(scores.entropy_BT, entropy_BT, relative)
    weights = torch.linspace(-1, 1, batch.mask_BT.numel(), dtype=dtype).view(batch.mask_BT.shape)

    def loss(scores: TokenScores, batch: Batch) -> Tensor:
        return (scores.logprobs_BT * weights).sum() + 0.3 * (scores.entropy_BT * weights.square()).sum()

    expected = loss(TokenScores(logprobs_BT=logprobs_BT, entropy_BT=entropy_BT), batch)
    if expected.requires_grad:
        assert_close(gradients(model, loss(scores, batch)), gradients(model, expected), relative)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(samples=forking_rows())
def test_ac_29_tree_equals_independent_rows_in_float64(name: str, samples: list[TrainSample]) -> None:
    equal_to_rows(shared_model(name), samples, torch.float64, 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(samples=forking_rows())
def test_ac_29_tree_equals_independent_rows_in_float32(name: str, samples: list[TrainSample]) -> None:
    equal_to_rows(shared_model(name, torch.float32), samples, torch.float32, 1e-5)


@cache
def lora_model(modules: tuple[str, ...]) -> nn.Module:
    return adapted(family("llama"), target_modules=list(modules))


@pytest.mark.parametrize("modules", [("q_proj", "v_proj", "down_proj"), ("k_proj", "lm_head")])
@settings(max_examples=8, deadline=None)
@given(samples=forking_rows())
def test_ac_29_tree_equals_independent_rows_under_lora(
    modules: tuple[str, ...], samples: list[TrainSample]
) -> None:
    equal_to_rows(lora_model(modules), samples, torch.float64, 1e-9)


def test_a_token_that_two_rows_share_and_train_receives_the_gradients_of_both() -> None:
    model = family("llama")
    ids, mask = [1, 2, 3, 4], [0, 0, 1, 1]
    (one,), two = [sample(ids, mask, 0)], [sample(ids, mask, 0), sample(ids, mask, 1)]
    once, twice = (one_batch(rows) for rows in ([one], two))
    assert build_tree(twice.ids_BT, [4, 4]).num_nodes == 4
    single = gradients(model, score_tokens(model, once).logprobs_BT.sum())
    assert_close(gradients(model, score_tokens(model, twice).logprobs_BT.sum()), 2 * single, 1e-12)


def test_each_shared_token_is_forwarded_once() -> None:
    model = family("llama")
    forwarded: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda m, i, o: forwarded.append(o[..., 0].numel()))
    can_share(model)  # the probe runs once, before what is counted
    forwarded.clear()
    prompt = [1, 2, 3, 4, 5, 6]
    batch = one_batch([sample([*prompt, 7 + g, 1], [0] * 6 + [1, 1], g) for g in range(4)])
    score_tokens(model, batch)
    assert forwarded == [6 + 4 * 2]


def test_attention_is_the_models_own_again_after_the_call() -> None:
    model = family("llama")
    before = model.config._attn_implementation
    score_tokens(model, one_batch([sample([1, 2, 3], [0, 1, 1], 0)]))
    assert model.config._attn_implementation == before
    with pytest.raises(IndexError):
        tree_hidden(model, build_tree(torch.tensor([[1, 10_000]]), [2]))
    assert model.config._attn_implementation == before


class Alibi(nn.Module):
    """Replaces the attention of a layer by one that reads distances off the order of the tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        out, weights = self.inner(hidden_states=hidden_states, **kwargs)
        steps = torch.arange(hidden_states.shape[1], dtype=out.dtype)
        return out * (1 + 0.1 * steps)[:, None], weights


def alibi() -> nn.Module:
    model = family("llama")
    model.model.layers[1].self_attn = Alibi(model.model.layers[1].self_attn)
    return model


def windowed() -> nn.Module:
    return family("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=0)


@pytest.mark.parametrize(("make", "reason"), [(alibi, "other values along a tree"), (windowed, "sliding")])
def test_a_model_that_cannot_falls_back_to_rows_and_says_so_once(make: Any, reason: str) -> None:
    model = make()
    samples = [sample([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], 0), sample([1, 2, 3, 7], [0, 0, 1, 1], 1)]
    batch = one_batch(samples)
    with pytest.warns(UserWarning, match=f"tree_fallback: .*{reason}"):
        scores = score_tokens(model, batch)
    assert_close(scores.logprobs_BT, alone(model, samples, batch)[0], 1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score_tokens(model, batch)
    assert not can_share(model)


def rounds_much() -> nn.Module:
    """As trained models of many layers do: in bfloat16 its states along a tree are rounded otherwise."""
    return family("llama", torch.bfloat16, num_hidden_layers=24, initializer_range=0.6)


def test_rounding_of_bfloat16_is_no_reason_to_fall_back() -> None:
    model = rounds_much()
    before = {name: (p.data_ptr(), p.dtype, p.clone()) for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert can_share(model)
    for name, parameter in model.named_parameters():
        address, dtype, values = before[name]
        assert (parameter.data_ptr(), parameter.dtype) == (address, dtype)
        assert torch.equal(parameter, values)
    hooked = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooked == []


def test_a_bfloat16_model_that_cannot_still_falls_back() -> None:
    model = rounds_much()
    model.model.layers[1].self_attn = Alibi(model.model.layers[1].self_attn)
    with pytest.warns(UserWarning, match="tree_fallback: .*other values along a tree"):
        assert not can_share(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_bfloat16_scores_are_close_and_their_type_is_float32() -> None:
    samples = [sample([1, 2, 3, 4 + g, 5], [0, 0, 1, 1, 1], g) for g in range(3)]
    batch = one_batch(samples, torch.float32)
    exact_scores = score_tokens(tiny_llama(torch.float32), batch).logprobs_BT
    low = score_tokens(tiny_llama(torch.bfloat16), batch).logprobs_BT
    assert low.dtype is torch.float32
    assert (low - exact_scores).abs().max() < 0.3
