"""Lean norms and gated units give what the model's own give, and leave the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import family

from nano_rl.learn.model.learner import prepare
from nano_rl.learn.tree_forward import _AdaptedLinear, _RMSNorm, _SiluProduct, low_memory_forwards


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


@pytest.mark.parametrize("biased", [False, True])
def test_adapted_linear_has_the_gradient_of_finite_differences(biased: bool) -> None:
    torch.manual_seed(0)
    x, down, up = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (2, 5), (4, 2))
    )
    weight = torch.randn(4, 5, dtype=torch.float64)
    bias = torch.randn(4, dtype=torch.float64) if biased else None
    assert torch.autograd.gradcheck(_AdaptedLinear.apply, (x, weight, bias, down, up, 2.0))


def test_an_adapter_on_bfloat16_weights_is_as_near_the_truth_as_that_of_peft() -> None:
    model = adapted()
    ids = torch.tensor([[1, 2, 3, 4]])
    trained = [p for p in model.parameters() if p.requires_grad]

    def run() -> tuple[torch.Tensor, ...]:
        logits = model(input_ids=ids).logits
        return logits.detach(), *torch.autograd.grad(logits.to(torch.float64).square().mean(), trained)

    with lean_norms_alone(model):
        of_peft = run()
    with low_memory_forwards(model):
        ours = run()
    # a learning rate of 1e-4 would be lost in the roundings of bfloat16
    assert {grad.dtype for grad in ours[1:]} == {torch.float32}
    model.double()
    truth = run()

    def error(values: tuple[torch.Tensor, ...]) -> float:
        parts = zip(values, truth, strict=True)
        return sum(float((v - t).norm() / t.norm()) for v, t in parts) / len(truth)

    assert error(ours) <= 1.1 * error(of_peft)
    assert error(of_peft) > 1e-3  # the comparison can fail: bfloat16 is far from the truth


def test_an_adapter_on_float32_weights_has_the_values_and_gradients_of_peft() -> None:
    model = adapted(torch.float32)
    ids = torch.tensor([[1, 2, 3, 4]])
    trained = [p for p in model.parameters() if p.requires_grad]
    with lean_norms_alone(model):
        plain = model(input_ids=ids).logits
        plain_gradients = torch.autograd.grad(plain.square().mean(), trained)
    with low_memory_forwards(model):
        lean = model(input_ids=ids).logits
        lean_gradients = torch.autograd.grad(lean.square().mean(), trained)
    torch.testing.assert_close(lean, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lean_gradients, plain_gradients, rtol=1e-4, atol=1e-6)


def test_an_adapter_keeps_no_float32_copy_of_its_input() -> None:
    model = adapted()
    kept: list[torch.Tensor] = []

    def note(value: torch.Tensor) -> torch.Tensor:
        kept.append(value)
        return value

    length, rank = 16, 4
    with low_memory_forwards(model), torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        model.get_base_model().model(input_ids=torch.ones(1, length, dtype=torch.long))  # type: ignore[operator]
    weights = {p.data_ptr() for p in model.parameters()}
    wide = [v for v in kept if v.dtype is torch.float32 and v.data_ptr() not in weights]
    # what the adapters' inner products are, and the one number a row of a norm
    assert {v.shape[-1] for v in wide if v.shape[-2:-1] == (length,)} <= {rank, 1}


@pytest.mark.parametrize("change", ["disabled", "merged", "dropout", "two", "thawed", "narrower"])
def test_an_adapter_that_does_more_keeps_its_own_forward(change: str) -> None:
    model = adapted(dropout=0.5 if change == "dropout" else 0.0)
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    if change == "dropout":
        model.train()
    elif change == "two":
        model.add_adapter("other", model.peft_config["default"])  # type: ignore[operator, index]
        model.base_model.set_adapter(["default", "other"])  # type: ignore[operator]
    elif change == "thawed":
        layer.base_layer.weight.requires_grad_()
    elif change == "narrower":
        layer.base_layer.double()
    elif change == "disabled":
        layer.enable_adapters(False)
    else:
        layer.merge()
    with low_memory_forwards(model):
        assert "forward" not in vars(layer)
    if change == "dropout":
        model.eval()
        with low_memory_forwards(model):
            assert "forward" in vars(layer)


def adapted(dtype: torch.dtype = torch.bfloat16, *, dropout: float = 0.0) -> Any:
    """A tiny Llama under adapters that change something."""
    torch.manual_seed(0)
    model = prepare(family("llama", torch.float32).to(dtype), lora_rank=4, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    for module in model.modules():
        if hasattr(module, "lora_dropout") and dropout:
            module.lora_dropout["default"] = torch.nn.Dropout(dropout)
    return model.eval()


@contextmanager
def lean_norms_alone(model: torch.nn.Module) -> Iterator[None]:
    """Lean forwards of everything but the adapters, whose values are what is compared."""
    with low_memory_forwards(model):
        for module in model.modules():
            if hasattr(module, "lora_A"):
                lean = vars(module).pop("forward")
                module._lean = lean
        yield
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.forward = vars(module).pop("_lean")
