"""Lean norms and gated units give what the model's own give, and leave the model as it was."""

from __future__ import annotations

import torch
from families import family

from nano_rl.learn.logprob import _RMSNorm, _SiluProduct, low_memory_forwards


def test_norm_equals_the_textbook_in_value_and_gradient() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    expected = weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))
    actual = _RMSNorm.apply(x, weight, 1e-5)
    grad = torch.randn(2, 6, 8)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad)
    )


def test_gated_product_has_the_gradient_of_finite_differences() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(_SiluProduct.apply, (gate, up))


def test_the_model_has_its_own_forwards_again_afterwards() -> None:
    model = family("qwen3", torch.float32)
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = model(input_ids=ids).logits
    with low_memory_forwards(model):
        lean = model(input_ids=ids).logits
        assert "forward" in vars(model.model.norm)
        assert "forward" in vars(model.model.layers[0].mlp)
    torch.testing.assert_close(lean, plain, rtol=1e-5, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())
