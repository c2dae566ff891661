"""Parts of Llama-like models that keep less for the backward pass, swapped in for a call.

Same formulas, fewer passes over memory: a norm keeps its input and one number a row, a gated unit the two
inputs of its product, a low-rank adapter its input as it came. An adapter on bfloat16 weights multiplies in
bfloat16, as under autocast, and its product is added in the matrix library's float32 and rounded once: PEFT's
own float32 copies of input and product were a third of a training step on a CPU, and three fifths of all that
was kept. Only modules whose formula is known are touched: RMSNorm with `variance_epsilon` (a plain weight;
others add 1 to it and name their epsilon otherwise), `down(silu(gate(x)) * up(x))`, and PEFT's plain LoRA of
one adapter on a frozen linear layer. The probe of `trees/forward.py` compares the whole with the model's own
forward before it is relied upon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def lean_forwards(model: nn.Module) -> Iterator[None]:
    """Lean forwards within, the model's own afterwards. Nothing changes for float64 weights, whose norms
    transformers computes in float32."""
    swapped: list[nn.Module] = []
    for module in model.modules():
        lean = _lean(module)
        if lean is not None and "forward" not in vars(module):
            setattr(module, "forward", lean)  # noqa: B010 (a method may not be assigned to)
            swapped.append(module)
    try:
        yield
    finally:
        for module in swapped:
            del module.forward


def _lean(module: Any) -> Callable[..., Tensor] | None:
    kind = type(module).__name__
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return None if module.weight.dtype is torch.float64 else partial(_norm, module)
    act = type(getattr(module, "act_fn", None)).__name__
    if kind.endswith("MLP") and act in ("SiLU", "SiLUActivation"):
        parts = {"gate_proj", "up_proj", "down_proj", "act_fn"}
        return partial(_gated, module) if {name for name, _ in module.named_children()} == parts else None
    if kind == "Linear" and hasattr(module, "lora_A"):
        return _adapted_linear(module)
    return None


def _adapted_linear(module: Any) -> Callable[..., Tensor] | None:
    """Of PEFT's LoRA where it is `base(x) + up(down(x)) * scaling` and nothing else."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    if module.disable_adapters or module.merged or len(names) != 1 or names[0] in module.lora_variant:
        return None
    name = names[0]
    down, up, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    plain = type(down) is type(up) is nn.Linear and down.bias is None and up.bias is None
    drops = dropout.training and getattr(dropout, "p", 0.0) > 0
    base = module.base_layer
    frozen = type(base) is nn.Linear and not any(p.requires_grad for p in base.parameters())
    if not plain or drops or not frozen or _narrower(down.weight, base.weight):
        return None
    return partial(_adapted, base, down.weight, up.weight, float(module.scaling[name]))


def _narrower(adapter: Tensor, base: Tensor) -> bool:
    """Whether the adapter rounds what the base does not."""
    return torch.promote_types(adapter.dtype, base.dtype) is not adapter.dtype


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    apply: Callable[..., Tensor] = _RMSNorm.apply
    return apply(hidden_states, module.weight, module.variance_epsilon)


def _gated(module: Any, x: Tensor) -> Tensor:
    apply: Callable[..., Tensor] = _SiluProduct.apply
    out: Tensor = module.down_proj(apply(module.gate_proj(x), module.up_proj(x)))
    return out


def _adapted(base: nn.Linear, down_RI: Tensor, up_OR: Tensor, scaling: float, x: Tensor) -> Tensor:
    apply: Callable[..., Tensor] = _AdaptedLinear.apply
    return apply(x, base.weight, base.bias, down_RI, up_OR, scaling)


class _AdaptedLinear(torch.autograd.Function):
    """`x W' + b + scaling (x down') up'` for frozen W and b, all products in the precision of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, down_RI: Tensor, up_OR: Tensor,
        scaling: float,
    ) -> Tensor:  # fmt: skip
        x_NI = x.flatten(0, -2)
        low_NR = x_NI @ down_RI.to(x.dtype).t()
        out_NO = nn.functional.linear(x_NI, weight_OI, bias_O)
        out_NO.addmm_(low_NR, up_OR.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(x_NI, weight_OI, down_RI, up_OR, low_NR)
        ctx.scaling = scaling
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_NI, weight_OI, down_RI, up_OR, low_NR = ctx.saved_tensors
        grad_NO = grad.flatten(0, -2)
        d_low_NR = (grad_NO @ up_OR.to(grad.dtype)).mul_(ctx.scaling)
        d_up_OR = (grad_NO.t() @ low_NR).to(up_OR.dtype).mul_(ctx.scaling)
        d_down_RI = (d_low_NR.t() @ x_NI).to(down_RI.dtype)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x_NI = (grad_NO @ weight_OI).addmm_(d_low_NR, down_RI.to(grad.dtype))
            d_x = d_x_NI.view(*grad.shape[:-1], -1)
        return d_x, None, None, d_down_RI, d_up_OR, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        normed = x * scale  # float32: so is the scale
        inner = (grad * weight).float()
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        share = torch.linalg.vecdot(inner, normed).div_(x.shape[-1])[..., None]
        d_x = inner.addcmul_(normed, share, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        d_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, nn.functional.silu(gate).mul_(grad)
