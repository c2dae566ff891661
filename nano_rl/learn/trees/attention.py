"""Attention along a token tree: each node sees its ancestors and itself, without a mask.

Runs attend to themselves under a causal triangle, descendants attend to a stretch of another run in full;
the parts are merged by their log-sum-exps. The backward pass gives each part the merged output and
log-sum-exp, which makes its gradients those of the whole softmax. Heads that share a key are one batch over
an expanded view: keys and values are never repeated in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.learn.trees.prefix_tree import TokenTree

NAME = "nano_tree"
"""under which transformers knows it"""
_REFUSED = ("softcap", "s_aux", "sliding_window", "position_bias")


class TreeUnsupported(ValueError):
    """A model wants something of its attention that the tree's does not do."""


def register() -> None:
    """Make the attention known to transformers. Without a tree it is SDPA: other callers notice nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    nano_tree: TokenTree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if nano_tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        plain: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
        return plain(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if refused or query.shape[0] != 1 or query.shape[2] != nano_tree.num_nodes:
        raise TreeUnsupported(f"attention with {', '.join(refused) or tuple(query.shape)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_attention(query[0], key[0], value[0], nano_tree, scale)[None], None


def tree_attention(
    query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, tree: TokenTree, scale: float
) -> Tensor:
    """[N, H, D] with H query heads over K key heads, H a multiple of K."""
    apply: Callable[..., Tensor] = _TreeAttention.apply
    return apply(query_HND, key_KND, value_KND, tree, scale)


class _TreeAttention(torch.autograd.Function):
    """Grouped views throughout: [K, G, n, D], K key heads of G query heads each."""

    @staticmethod
    def forward(
        ctx: Any, query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, tree: TokenTree, scale: float
    ) -> Tensor:
        heads, nodes, _ = query_HND.shape
        query, key, value = _grouped(query_HND, key_KND, value_KND)
        wide = torch.promote_types(query.dtype, torch.float32)
        out_NHD = query.new_empty((nodes, heads, value.shape[-1]), dtype=wide)
        out = _view(out_NHD, key_KND.shape[0])
        lse = query.new_empty(query.shape[:3], dtype=wide)
        for start, end in tree.runs:
            own = slice(start, end)
            out[:, :, own], lse[:, :, own] = _attend(
                query[:, :, own], key[:, :, own], value[:, :, own], causal=True, scale=scale
            )
        for cross in tree.crosses:
            descendants, stretch = _slices(cross)
            part, part_lse = _attend(
                query[:, :, descendants], key[:, :, stretch], value[:, :, stretch], causal=False, scale=scale
            )
            merged, merged_lse = out[:, :, descendants], lse[:, :, descendants]
            both = torch.logaddexp(merged_lse, part_lse)
            merged.mul_((merged_lse - both).exp_()[..., None])
            merged.addcmul_(part.to(wide), (part_lse - both).exp_()[..., None])
            merged_lse.copy_(both)
        out_NHD = out_NHD.to(query.dtype)
        ctx.save_for_backward(query_HND, key_KND, value_KND, out_NHD, lse)
        ctx.tree, ctx.scale = tree, scale
        return out_NHD

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_HND, key_KND, value_KND, out_NHD, lse = ctx.saved_tensors
        kind = query_HND.dtype
        wide = torch.promote_types(kind, torch.float32)
        # on CPU the backward of short runs is four times as fast in float32 as in bfloat16
        query, key, value = _grouped(query_HND.to(wide), key_KND.to(wide), value_KND.to(wide))
        key_heads = key_KND.shape[0]
        out, grad = (_view(x.to(wide), key_heads) for x in (out_NHD, grad_NHD))
        # laid out as the projections read them: nodes first
        d_query_NHD = torch.empty_like(out_NHD, dtype=wide)
        d_key_NKD, d_value_NKD = (
            x.new_empty((x.shape[1], key_heads, x.shape[2]), dtype=wide) for x in (key_KND, value_KND)
        )
        d_query = _view(d_query_NHD, key_heads)
        d_key, d_value = d_key_NKD.transpose(0, 1), d_value_NKD.transpose(0, 1)

        def part(queries: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            d_q, d_k, d_v = _attend_backward(
                grad[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                causal=causal,
                scale=ctx.scale,
            )
            return d_q, d_k.sum(1), d_v.sum(1)

        for start, end in ctx.tree.runs:
            own = slice(start, end)
            d_query[:, :, own], d_key[:, own], d_value[:, own] = part(own, own, causal=True)
        for cross in ctx.tree.crosses:
            descendants, stretch = _slices(cross)
            d_q, d_k, d_v = part(descendants, stretch, causal=False)
            d_query[:, :, descendants].add_(d_q)
            d_key[:, stretch].add_(d_k)
            d_value[:, stretch].add_(d_v)
        return (
            d_query_NHD.transpose(0, 1).to(kind),
            d_key.to(kind),
            d_value.to(kind),
            None,
            None,
        )


def _grouped(query_HND: Tensor, key_KND: Tensor, value_KND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = query_HND.shape[0] // key_KND.shape[0]
    key, value = (x[:, None].expand(-1, groups, -1, -1) for x in (key_KND, value_KND))
    return query_HND.view(-1, groups, *query_HND.shape[1:]), key, value


def _view(values_NHD: Tensor, key_heads: int) -> Tensor:
    nodes, heads, width = values_NHD.shape
    return values_NHD.view(nodes, key_heads, heads // key_heads, width).permute(1, 2, 0, 3)


def _slices(cross: Any) -> tuple[slice, slice]:
    return slice(cross.query_start, cross.query_end), slice(cross.key_start, cross.key_end)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [K, G, n, D] and log-sum-exp [K, G, n]."""
    if query.device.type == "cpu":
        flash: Callable[..., tuple[Tensor, Tensor]]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, causal, scale=scale)
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp_().to(value.dtype) @ value, lse


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value, each [K, G, n, D], of the softmax that `lse` normalises."""
    if query.device.type == "cpu":
        flash: Callable[..., tuple[Tensor, Tensor, Tensor]]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, query, key, value, out, lse.contiguous(), 0.0, causal, scale=scale)
    weights = (_scores(query, key, causal, scale) - lse[..., None]).exp_()
    inner = (grad @ value.transpose(-1, -2)) - (grad * out).sum(-1, keepdim=True)
    d_scores = inner.mul_(weights).mul_(scale)
    return d_scores @ key, d_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores
