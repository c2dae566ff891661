"""The forward pass over a token tree, and layers for it that keep less memory for the backward pass.

Whether a model gives the same values along a tree as on plain rows is tested once, on first use. The
low-memory layers have the model's formulas: a norm keeps its input and one number per row, a gated unit the
two factors of its product. Only modules with a known formula are replaced: RMSNorm with `variance_epsilon`
(others add 1 to the weight), and `down(silu(gate(x)) * up(x))`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nano_rl.learn.prefix_tree import ATTENTION_NAME, TokenTree, TreeUnsupported, build_tree, register
from nano_shared.errors import ConfigError
from nano_shared.process import unmap_freed_memory


@contextmanager
def low_memory_forwards(model: nn.Module) -> Iterator[None]:
    """Temporarily replace the forwards of known modules by the low-memory ones; not norms of float64 weights,
    which transformers computes in float32."""
    swapped: list[nn.Module] = []
    for module in model.modules():
        forward = _low_memory_forward(module)
        if forward is not None and "forward" not in vars(module):
            setattr(module, "forward", forward)  # noqa: B010 (a method may not be assigned to)
            swapped.append(module)
    try:
        yield
    finally:
        for module in swapped:
            del module.forward


def _low_memory_forward(module: Any) -> Callable[..., Tensor] | None:
    kind = type(module).__name__
    if kind.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        return None if module.weight.dtype is torch.float64 else partial(_norm, module)
    act = type(getattr(module, "act_fn", None)).__name__
    if kind.endswith("MLP") and act in ("SiLU", "SiLUActivation"):
        parts = {"gate_proj", "up_proj", "down_proj", "act_fn"}
        return partial(_gated, module) if {name for name, _ in module.named_children()} == parts else None
    return None


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.is_cuda:  # PyTorch's kernel keeps as little, and is the sampler's
        weight: Tensor = module.weight
        return nn.functional.rms_norm(hidden_states, weight.shape, weight, module.variance_epsilon)
    apply: Callable[..., Tensor] = _RMSNorm.apply
    return apply(hidden_states, module.weight, module.variance_epsilon)


def _gated(module: Any, x: Tensor) -> Tensor:
    apply: Callable[..., Tensor] = _SiluProduct.apply
    out: Tensor = module.down_proj(apply(module.gate_proj(x), module.up_proj(x)))
    return out


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


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""largest allowed difference between tree and rows, relative to the largest hidden value"""
_supported: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def backbone(causal: Any) -> Any:
    """The part of a causal LM below its head."""
    return causal.base_model


def tree_hidden(causal: Any, tree: TokenTree) -> Tensor:
    """[N, H] last hidden states of the nodes under a causal LM."""
    again = partial(_as_in_forward, causal)
    with _tree_attention(causal), low_memory_forwards(causal), _checkpointed(causal, again):
        hidden: Tensor = backbone(causal)(
            input_ids=tree.ids_N[None],
            position_ids=tree.positions_N[None],
            # a 4-dimensional mask is passed on unchanged, and ours is not read
            attention_mask=tree.ids_N.new_ones((1, 1, 1, 1), dtype=torch.bool),
            use_cache=False,
            nano_tree=tree,
        ).last_hidden_state
    return hidden[0]


def row_states(causal: Any, ids_BT: Tensor, attention_BT: Tensor) -> tuple[Tensor, Tensor]:
    """([M, H] last hidden states of rows padded on the right, [B, T] index of each token's state), over the
    token tree, or row by row if the model cannot share prefixes."""
    if shares_prefixes(causal):
        tree = build_tree(ids_BT, attention_BT.long().sum(1).tolist())
        return tree_hidden(causal, tree), tree.node_BT
    with _checkpointed(causal, dropout_off):
        hidden_BTH: Tensor = backbone(causal)(
            input_ids=ids_BT, attention_mask=attention_BT, use_cache=False
        ).last_hidden_state
    every = torch.arange(ids_BT.numel(), device=ids_BT.device).view(ids_BT.shape)
    return hidden_BTH.flatten(0, 1), every


@contextmanager
def dropout_off(model: nn.Module) -> Iterator[None]:
    """Temporarily no dropout, in any mode of the model."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _as_in_forward(causal: Any, layer: nn.Module) -> Iterator[None]:
    """What surrounds the forward pass along a tree, for a layer that the backward pass computes again."""
    with _tree_attention(causal), low_memory_forwards(layer), dropout_off(layer):
        yield


@contextmanager
def _checkpointed(
    causal: nn.Module, again: Callable[[nn.Module], AbstractContextManager[None]]
) -> Iterator[None]:
    """Keep the input of each layer that `checkpoint_layers` has marked; it is computed again in the backward
    pass, in the context that `again` gives for it."""
    layers = [layer for layer in causal.modules() if getattr(layer, "gradient_checkpointing", False) is True]
    for layer in layers if torch.is_grad_enabled() else ():
        contexts = partial(lambda layer: (nullcontext(), again(layer)), layer)
        run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        layer.training, layer._gradient_checkpointing_func = True, run  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def checkpoint_layers(model: nn.Module) -> None:
    """Mark all layers of the model for gradient checkpointing. Raises ConfigError if it has none."""
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that transformers can checkpoint; leave"
            " gradient_checkpointing out"
        )
    unmap_freed_memory()
    for layer in layers:
        layer.gradient_checkpointing = True


def shares_prefixes(causal: nn.Module) -> bool:
    """True if the model gives the same states along a tree as row by row; tested once, with a warning if
    not."""
    if causal not in _supported:
        reason = _objection(causal)
        _supported[causal] = reason is None
        if reason is not None:
            warnings.warn(
                f"tree_fallback: {type(causal).__name__} runs on independent rows, prefixes are computed"
                f" again for each: {reason}",
                stacklevel=2,
            )
    return _supported[causal]


@contextmanager
def independent_rows(causal: nn.Module) -> Iterator[None]:
    """Temporarily run rows independently, for comparison."""
    before = shares_prefixes(causal)
    _supported[causal] = False
    try:
        yield
    finally:
        _supported[causal] = before


def config_objection(config: Any) -> str | None:
    """Why a model of this configuration cannot share prefixes, as far as that says: the rows of the test are
    too short to show a window."""
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        if getattr(config, name, None) is not None and getattr(config, f"use_{name}", True):
            return f"it has {name}={getattr(config, name)}"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    return None


def _objection(causal: Any) -> str | None:
    if objection := config_objection(getattr(causal, "config", None)):
        return objection
    try:
        difference = _difference(causal)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # other modelling code may raise any of these for arguments that it does not expect
        return f"{type(error).__name__}: {error}".splitlines()[0]
    bound = _TOLERANCE.get(causal.get_input_embeddings().weight.dtype, _TOLERANCE[torch.float32])
    return None if difference <= bound else f"it gives other values along a tree (by {difference:.2g})"


@torch.no_grad()
def _difference(causal: Any) -> float:
    """Largest relative difference between tree and plain rows, on rows with nested forks."""
    embedding: Tensor = causal.get_input_embeddings().weight
    vocabulary, device = embedding.shape[0], embedding.device
    prefix = [(7 * i + 3) % vocabulary for i in range(12)]
    rows = [[*prefix, 1, 2, 3], [*prefix, 1, 2, 4, 5, 0], [*prefix[:5], 6 % vocabulary, 1], [2, *prefix]]
    width = max(map(len, rows))
    lengths = [len(row) for row in rows]
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device) % vocabulary
    tree = build_tree(ids_BT, lengths)
    real_BT = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    with _in_float32(backbone(causal)):
        along = tree_hidden(causal, tree)[tree.node_BT]
        plain = backbone(causal)(
            input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False
        ).last_hidden_state
    if not plain[real_BT].isfinite().all():
        return 0.0  # broken weights are reported by the guards
    worst = (along - plain).abs()[real_BT].max() / plain[real_BT].abs().max().clamp(min=1e-12)
    return float(worst)


@contextmanager
def _in_float32(body: nn.Module) -> Iterator[None]:
    """Temporarily widen weights of lower precision, one layer at a time while it runs: in bfloat16 rounding
    alone changes the states of thirty trained layers by a third, as much as a wrong mask."""
    narrow: list[tuple[nn.Parameter, Tensor]] = []

    def widen(part: nn.Module, _: Any) -> None:
        for parameter in part.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                narrow.append((parameter, parameter.data))
                parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        while narrow:
            parameter, data = narrow.pop()
            parameter.data = data

    with ExitStack() as hooks:
        hooks.callback(restore)
        for child in body.children():
            for part in child if isinstance(child, nn.ModuleList) else [child]:
                hooks.enter_context(part.register_forward_pre_hook(widen))
                hooks.enter_context(part.register_forward_hook(restore, always_call=True))
        yield


@contextmanager
def _tree_attention(causal: Any) -> Iterator[None]:
    """Temporarily select the tree attention in the model's config."""
    config = getattr(causal, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise TreeUnsupported("its attention cannot be chosen")
    register()
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def layers_of(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
