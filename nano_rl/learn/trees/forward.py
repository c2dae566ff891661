"""The backbone over a token tree, and whether a model can be run that way: found out on a probe, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nano_rl.learn.trees.attention import NAME, TreeUnsupported, register
from nano_rl.learn.trees.low_memory_layers import lean_forwards
from nano_rl.learn.trees.prefix_tree import TokenTree, build_tree

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""largest difference between tree and rows on the probe, as a share of the largest hidden value"""
_supported: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def tree_hidden(causal: Any, tree: TokenTree) -> Tensor:
    """[N, H] last hidden states of the nodes under a Llama-like causal LM (`.model`)."""
    with _tree_attention(causal), lean_forwards(causal):
        hidden: Tensor = causal.model(
            input_ids=tree.ids_N[None],
            position_ids=tree.positions_N[None],
            # a mask of four dimensions is handed on as it is; ours is never read
            attention_mask=tree.ids_N.new_ones((1, 1, 1, 1), dtype=torch.bool),
            use_cache=False,
            nano_tree=tree,
        ).last_hidden_state
    return hidden[0]


def row_states(causal: Any, ids_BT: Tensor, attention_BT: Tensor) -> tuple[Tensor, Tensor]:
    """[M, H] last hidden states of rows padded on the right, and which of them is that of each token [B, T]:
    along their tree, or row by row where a model cannot share prefixes."""
    if shares_prefixes(causal):
        tree = build_tree(ids_BT, attention_BT.long().sum(1).tolist())
        return tree_hidden(causal, tree), tree.node_BT
    hidden_BTH: Tensor = causal.model(
        input_ids=ids_BT, attention_mask=attention_BT, use_cache=False
    ).last_hidden_state
    every = torch.arange(ids_BT.numel(), device=ids_BT.device).view(ids_BT.shape)
    return hidden_BTH.flatten(0, 1), every


def shares_prefixes(causal: nn.Module) -> bool:
    """Whether the model gives the same along a tree as row by row. Decided at first use, said if not."""
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
    """Rows apart even where the model could share prefixes: the other side of a comparison."""
    before = shares_prefixes(causal)
    _supported[causal] = False
    try:
        yield
    finally:
        _supported[causal] = before


def _objection(causal: Any) -> str | None:
    config = getattr(causal, "config", None)
    # a window longer than the probe would not show on it
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        if getattr(config, name, None) is not None and getattr(config, f"use_{name}", True):
            return f"it has {name}={getattr(config, name)}"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}"
    try:
        difference = _difference(causal)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # whatever foreign modelling code raises at arguments that it does not expect
        return f"{type(error).__name__}: {error}".splitlines()[0]
    bound = _TOLERANCE.get(causal.model.embed_tokens.weight.dtype, _TOLERANCE[torch.float32])
    return None if difference <= bound else f"it gives other values along a tree (by {difference:.2g})"


@torch.no_grad()
def _difference(causal: Any) -> float:
    """Of tree and plain rows, relative to the largest value, on rows with nested forks."""
    vocabulary = causal.model.embed_tokens.weight.shape[0]
    device = causal.model.embed_tokens.weight.device
    trunk = [(7 * i + 3) % vocabulary for i in range(12)]
    rows = [[*trunk, 1, 2, 3], [*trunk, 1, 2, 4, 5, 0], [*trunk[:5], 6 % vocabulary, 1], [2, *trunk]]
    width = max(map(len, rows))
    lengths = [len(row) for row in rows]
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device) % vocabulary
    tree = build_tree(ids_BT, lengths)
    real_BT = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    with _in_float32(causal.model):
        along = tree_hidden(causal, tree)[tree.node_BT]
        plain = causal.model(
            input_ids=ids_BT, attention_mask=real_BT.long(), use_cache=False
        ).last_hidden_state
    if not plain[real_BT].isfinite().all():
        return 0.0  # broken weights, which the guards tell, are no matter of trees
    worst = (along - plain).abs()[real_BT].max() / plain[real_BT].abs().max().clamp(min=1e-12)
    return float(worst)


@contextmanager
def _in_float32(body: nn.Module) -> Iterator[None]:
    """Weights of lower precision are widened while their part of the model runs, one layer at a time.

    In bfloat16, rounding alone moves states of thirty trained layers by a third: as far as a wrong mask does.
    """
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
    """Its attention for this call; with the plain one restored whatever happens."""
    config = getattr(causal, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise TreeUnsupported("its attention cannot be chosen")
    register()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
