"""LoRA layers of PEFT as they are trained and sampled: base and adapter apart, their sum rounded once.

    y = round(x W' + s (x A') B') + b

A young adapter changes a value by less than half a unit in the last place of bfloat16. Added to a weight, or
to a product that is rounded already, as PEFT does, it is rounded away; added before the product is rounded,
it changes one value in many, and the mean of all by what it should.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from nano_shared.errors import ConfigError


class LowRank(NamedTuple):
    """The adapter of a layer, a product of two matrices, in the adapter's precision."""

    down: Tensor
    """[R, in] A"""
    up: Tensor
    """[out, R] B"""
    scaling: float


def adapter_of(layer: Any) -> LowRank | None:
    """What a layer's one active adapter adds: nothing but a low-rank product; else None."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] in layer.lora_variant:
        return None
    down, up, dropout = layer.lora_A[names[0]], layer.lora_B[names[0]], layer.lora_dropout[names[0]]
    plain = type(down) is type(up) is nn.Linear and down.bias is None and up.bias is None
    if not plain or (dropout.training and getattr(dropout, "p", 0.0) > 0):
        return None
    return LowRank(down.weight, up.weight, float(layer.scaling[names[0]]))


def round_once(model: nn.Module) -> None:
    """Make every LoRA layer over a linear layer compute its sum as above, in its gradient too.

    Layers that do more than that, or over weights that are trained themselves, compute as PEFT does.
    """
    for layer in model.modules():
        if hasattr(layer, "lora_A") and _weight_of(getattr(layer, "base_layer", None)) is not None:
            layer.__class__ = _rounding_once(cast("Any", type(layer)))


def merge_adapter(model: Any) -> tuple[nn.Module, float]:
    """The base with its adapters added to its weights, summed in float32 and rounded once, and the share of
    their change that the rounded weights show: `<rounded - W, change> / <change, change>` over all weights; 1
    without rounding. Uses `model` up. Raises ConfigError for an adapter that is not added to weights.
    """
    if not hasattr(model.base_model, "unload"):
        raise ConfigError("its adapter is no change of the weights, and cannot be merged into them")
    shown = change = 0.0
    for layer in (part for part in model.modules() if hasattr(part, "get_delta_weight")):
        weights = [p for p in layer.get_base_layer().parameters(recurse=False) if p.is_floating_point()]
        before = [p.data for p in weights]
        for p in weights:
            p.data = p.data.float()
        layer.merge()
        for p, base in zip(weights, before, strict=True):
            added, p.data = p.data - base, p.data.to(base.dtype)
            shown += float(torch.sum((p.data.float() - base) * added))
            change += float(added.square().sum())
    return model.unload(), shown / change if change else 1.0


@cache
def _rounding_once(kind: type[nn.Module]) -> type[nn.Module]:
    return kind if issubclass(kind, _RoundsOnce) else type(kind.__name__, (_RoundsOnce, kind), {})


class _RoundsOnce(nn.Module):
    """Before a layer of PEFT among the bases of a class."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        adapter, base = adapter_of(layer), layer.base_layer
        trained = any(p.requires_grad for p in base.parameters())
        if adapter is None or trained or args or kwargs or _narrower(adapter.down, x):
            out: Tensor = super().forward(x, *args, **kwargs)
            return out
        product: Callable[..., Tensor] = _AdaptedProduct.apply
        return product(x, _weight_of(base), base.bias, *adapter)


def _narrower(adapter: Tensor, x: Tensor) -> bool:
    """True if the adapter has a lower precision than the layer's input."""
    return torch.promote_types(adapter.dtype, x.dtype) is not adapter.dtype


def _weight_of(base: Any) -> Tensor | Callable[[], Tensor] | None:
    """The [out, in] weight of a linear layer; a function that dequantises it; None for another layer."""
    kind = type(base)
    if kind is nn.Linear:
        weight: Tensor = base.weight
        return weight
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return base.weight.t()  # type: ignore[no-any-return]
    names = {k.__name__ for k in kind.__mro__ if k.__module__.startswith("bitsandbytes")}
    if "Linear4bit" in names:
        return lambda: _four_bits(base)
    return (lambda: _eight_bits(base)) if "Linear8bitLt" in names else None


def _four_bits(base: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(base.weight.data, base.weight.quant_state)
    return weight


def _eight_bits(base: Any) -> Tensor:
    if base.weight.CB is not None:
        base.init_8bit_state()
    codes, scales = base.state.CB, base.state.SCB
    return codes.float() * (scales.float() / 127)[:, None]  # type: ignore[no-any-return]


class _AdaptedProduct(torch.autograd.Function):
    """`x W' + b + scaling (x down') up'` for frozen W and b; the products in the precision of x, their sum
    rounded once. W may be a function, which is called again for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OI: Tensor | Callable[[], Tensor], bias_O: Tensor | None, down_RI: Tensor,
        up_OR: Tensor, scaling: float,
    ) -> Tensor:  # fmt: skip
        x_NI = x.flatten(0, -2)
        low_NR = x_NI @ down_RI.to(x.dtype).t()
        out_NO = low_NR @ (up_OR * scaling).to(x.dtype).t()
        # the product is added to what is in `out_NO`, and rounded after that
        out_NO.addmm_(x_NI, _read(weight_OI, x).t())
        if bias_O is not None:
            out_NO.add_(bias_O)
        kept = [weight_OI] if isinstance(weight_OI, Tensor) else []
        ctx.save_for_backward(x_NI, down_RI, up_OR, low_NR, *kept)
        ctx.scaling, ctx.weight = scaling, None if kept else weight_OI
        return out_NO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, down_RI, up_OR, low_NR, *kept = ctx.saved_tensors
        grad_NO = grad.flatten(0, -2)
        d_low_NR = (grad_NO @ up_OR.to(grad.dtype)).mul_(ctx.scaling)
        d_up_OR = (grad_NO.t() @ low_NR).to(up_OR.dtype).mul_(ctx.scaling)
        d_down_RI = (d_low_NR.t() @ x_NI).to(down_RI.dtype)
        d_x = None
        if ctx.needs_input_grad[0]:
            weight_OI = _read(kept[0] if kept else ctx.weight, grad)
            d_x_NI = (grad_NO @ weight_OI).addmm_(d_low_NR, down_RI.to(grad.dtype))
            d_x = d_x_NI.view(*grad.shape[:-1], -1)
        return d_x, None, None, d_down_RI, d_up_OR, None


def _read(weight_OI: Tensor | Callable[[], Tensor], like: Tensor) -> Tensor:
    weight = weight_OI if isinstance(weight_OI, Tensor) else weight_OI()
    return weight.to(like.dtype)
