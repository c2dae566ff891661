"""Token trees: the rows of a batch with each shared prefix merged, and attention along the tree.

Rows are sorted, and each row adds only the tokens after its common prefix with the row before it; nodes are
numbered depth first. Each node sees its ancestors and itself: runs attend to themselves under a causal
triangle, descendants attend to a stretch of another run in full, and the parts are merged by their
log-sum-exps, which the backward pass gives each part, so that its gradients are those of the whole softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Cross:
    """The nodes [query_start, query_end) all descend from all the nodes [key_start, key_end)."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTree:
    """N nodes of one or several trees; a node is a token with the path before it."""

    ids_N: Tensor
    """int64 token of each node"""
    positions_N: Tensor
    """int64 depth of each node, its position in all rows that contain it"""
    node_BT: Tensor
    """int64 node of each token of the rows; 0 in the padding"""
    runs: tuple[tuple[int, int], ...]
    """[start, end) of chains of consecutive nodes; every node is in exactly one"""
    crosses: tuple[Cross, ...]
    """what nodes see of other runs; together with the causal triangles of the runs, all ancestors"""

    @property
    def num_nodes(self) -> int:
        return self.ids_N.numel()

    def to(self, device: torch.device | str) -> TokenTree:
        placed = {name: getattr(self, name).to(device) for name in ("ids_N", "positions_N", "node_BT")}
        return replace(self, **placed)


def build_tree(ids_BT: Tensor, lengths: Sequence[int]) -> TokenTree:
    """The trees of B rows, row b being `ids_BT[b, :lengths[b]]`; one tree per distinct first token."""
    rows = [row[:length] for row, length in zip(ids_BT.tolist(), lengths, strict=True)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    nodes = torch.zeros(ids_BT.shape, dtype=torch.int64)
    ids, positions, runs, walk = list[int](), list[int](), list[tuple[int, int]](), _Walk()
    previous: int | None = None
    for b in order:
        row, start = rows[b], len(ids)
        shared = 0 if previous is None else common_prefix(rows[previous], row)
        if shared:
            nodes[b, :shared] = nodes[previous, :shared]
        if shared < len(row):
            nodes[b, shared : len(row)] = torch.arange(start, start + len(row) - shared)
            walk.leave(shared, start)
            walk.enter(shared, len(row), start)
            ids += row[shared:]
            positions += range(shared, len(row))
            runs.append((start, len(ids)))
        previous = b
    walk.leave(0, len(ids))
    tree = TokenTree(
        ids_N=torch.tensor(ids, dtype=torch.int64), positions_N=torch.tensor(positions, dtype=torch.int64),
        node_BT=nodes, runs=tuple(runs), crosses=tuple(walk.crosses),
    )  # fmt: skip
    return tree.to(ids_BT.device)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] is shared, a[:high] is not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class _Segment:
    """The first tokens of a run that are still on the path to the present row."""

    depth: int
    end_depth: int
    start: int
    run_end: int


class _Walk:
    """The path to the present row as segments of runs; later nodes do not see what is cut off."""

    def __init__(self) -> None:
        self.crosses: list[Cross] = []
        self._path: list[_Segment] = []

    def enter(self, depth: int, end_depth: int, start: int) -> None:
        self._path.append(_Segment(depth, end_depth, start, start + end_depth - depth))

    def leave(self, depth: int, now: int) -> None:
        """Cut the path at `depth`. All nodes between the end of a cut segment's run and `now` descend from
        it."""
        while self._path and self._path[-1].end_depth > depth:
            segment = self._path[-1]
            kept = max(depth, segment.depth)
            if now > segment.run_end:
                key = segment.start + kept - segment.depth, segment.start + segment.end_depth - segment.depth
                self.crosses.append(Cross(segment.run_end, now, *key))
            segment.end_depth = kept
            if kept == segment.depth:
                self._path.pop()


ATTENTION_NAME = "nano_tree"
"""name of the attention in transformers"""
Inputs = tuple[Tensor, Tensor, Tensor]
"""query, key and value of an attention"""
_REFUSED = ("softcap", "s_aux", "sliding_window", "position_bias")


class TreeUnsupported(ValueError):
    """The model needs a feature that the tree attention does not have."""


def register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sdpa_mask)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, nano_tree: TokenTree | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
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
    """[N, H, D] attention output; H query heads over K key heads, H a multiple of K."""
    flash = has_flash(query_HND) and query_HND.shape[-1] == value_KND.shape[-1]
    apply: Callable[..., Tensor] = (_FlashTreeAttention if flash else _TreeAttention).apply
    return apply(query_HND, key_KND, value_KND, tree, scale)


def has_flash(query: Tensor) -> bool:
    """Whether PyTorch has FlashAttention over sequences of several lengths for these queries."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and narrow and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashPass:
    """Pairs of stretches of queries and keys that one call of FlashAttention covers. No query is in two."""

    queries_n: Tensor | None
    """int64 nodes of the queries, stretch by stretch; None: all nodes"""
    keys_m: Tensor | None
    bounds_q: Tensor
    """int32 [P + 1] where each of P stretches begins among the queries"""
    bounds_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool
    """aligned at the ends: the last query of a stretch sees all keys of its pair, the one before it all but
    the last, and so on"""

    def queries(self, values: Tensor) -> Tensor:
        return values if self.queries_n is None else values.index_select(0, self.queries_n)

    def keys(self, values: Tensor) -> Tensor:
        return values if self.keys_m is None else values.index_select(0, self.keys_m)


_MAX_KEYS_PER_NODE = 8
"""bound of the keys of one pass over whole paths, copies counted, by the nodes of the tree"""


@lru_cache(maxsize=2)
def flash_passes(tree: TokenTree) -> list[FlashPass]:
    """One causal pass in which each run attends to a copy of its whole path. Where the copies would take too
    much memory: the runs by themselves, then all crosses in as few passes as the depth of the tree allows."""
    device = tree.ids_N.device

    def bounds(sizes: Sequence[int]) -> tuple[Tensor, int]:
        return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device), max(sizes)

    def nodes(stretches: Sequence[tuple[int, int]]) -> Tensor:
        return torch.cat([torch.arange(start, end) for start, end in stretches]).to(device)

    own, longest = bounds([end - start for start, end in tree.runs])
    whole = paths(tree)
    sizes = [sum(end - start for start, end in path) for path in whole]
    if tree.crosses and sum(sizes) <= _MAX_KEYS_PER_NODE * tree.num_nodes:
        of_paths, longest_path = bounds(sizes)
        return [
            FlashPass(
                queries_n=None, keys_m=nodes([part for path in whole for part in path]), bounds_q=own,
                bounds_k=of_paths, longest_q=longest, longest_k=longest_path, causal=True,
            )
        ]  # fmt: skip
    passes = [
        FlashPass(
            queries_n=None, keys_m=None, bounds_q=own, bounds_k=own, longest_q=longest, longest_k=longest,
            causal=True,
        )
    ]  # fmt: skip
    levels: list[list[Cross]] = []
    for cross in sorted(tree.crosses, key=lambda one: one.query_start):
        free = (level for level in levels if level[-1].query_end <= cross.query_start)
        level = next(free, None)
        if level is None:
            levels.append([cross])
        else:
            level.append(cross)
    for level in levels:
        of_queries = [(cross.query_start, cross.query_end) for cross in level]
        of_keys = [(cross.key_start, cross.key_end) for cross in level]
        bounds_q, longest_q = bounds([end - start for start, end in of_queries])
        bounds_k, longest_k = bounds([end - start for start, end in of_keys])
        passes.append(
            FlashPass(
                queries_n=nodes(of_queries), keys_m=nodes(of_keys), bounds_q=bounds_q, bounds_k=bounds_k,
                longest_q=longest_q, longest_k=longest_k, causal=False,
            )
        )  # fmt: skip
    return passes


def paths(tree: TokenTree) -> list[list[tuple[int, int]]]:
    """For each run the stretches of nodes [start, end) from its root to its end."""
    waiting = sorted(tree.crosses, key=lambda cross: cross.query_start, reverse=True)
    seen: list[Cross] = []
    found = []
    for start, end in tree.runs:
        while waiting and waiting[-1].query_start <= start:
            seen.append(waiting.pop())
        seen = [cross for cross in seen if cross.query_end > start]
        found.append([*sorted((cross.key_start, cross.key_end) for cross in seen), (start, end)])
    return found


class _FlashTreeAttention(torch.autograd.Function):
    """As `_TreeAttention`, in one call for all runs, or one more for each depth of the tree."""

    @staticmethod
    def forward(
        ctx: Any, query_HND: Tensor, key_KND: Tensor, value_KND: Tensor, tree: TokenTree, scale: float
    ) -> Tensor:
        query, key, value = (x.transpose(0, 1) for x in (query_HND, key_KND, value_KND))
        first, *crosses = flash_passes(tree)
        out_NHD, lse_HN, *ctx.rng = flash(first, query, key, value, scale)
        if crosses:
            out_NHD = out_NHD.float()
        for one in crosses:
            part, part_lse, *_ = flash(one, query, key, value, scale)
            assert one.queries_n is not None
            lse = lse_HN.index_select(1, one.queries_n)
            both = torch.logaddexp(lse, part_lse)
            merged = one.queries(out_NHD) * (lse - both).exp_().t()[..., None]
            merged.addcmul_(part.float(), (part_lse - both).exp_().t()[..., None])
            out_NHD.index_copy_(0, one.queries_n, merged)
            lse_HN.index_copy_(1, one.queries_n, both)
        out_NHD = out_NHD.to(query.dtype)
        ctx.save_for_backward(query_HND, key_KND, value_KND, out_NHD, lse_HN)
        ctx.tree, ctx.scale = tree, scale
        return out_NHD

    @staticmethod
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query_HND, key_KND, value_KND, out_NHD, lse_HN = ctx.saved_tensors
        given = query_HND.transpose(0, 1), key_KND.transpose(0, 1), value_KND.transpose(0, 1)
        rest = (grad_NHD.contiguous(), out_NHD, lse_HN, ctx.rng, ctx.scale)
        first, *crosses = flash_passes(ctx.tree)
        d_query, d_key, d_value = flash_backward(first, given, *rest)
        if first.keys_m is not None:  # the copies of a key add up in float32
            d_key, d_value = (
                torch.zeros_like(x, dtype=torch.float32).index_add_(0, first.keys_m, part.float())
                for x, part in zip(given[1:], (d_key, d_value), strict=True)
            )
        if crosses:  # so do the parts
            d_query, d_key, d_value = d_query.float(), d_key.float(), d_value.float()
        for one in crosses:
            d_q, d_k, d_v = flash_backward(one, given, *rest)
            assert one.queries_n is not None
            assert one.keys_m is not None
            d_query.index_add_(0, one.queries_n, d_q.float())
            d_key.index_add_(0, one.keys_m, d_k.float())
            d_value.index_add_(0, one.keys_m, d_v.float())
        kind = query_HND.dtype
        return (*(x.to(kind).transpose(0, 1) for x in (d_query, d_key, d_value)), None, None)


def flash(
    one: FlashPass, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """[n, H, D] outputs and [H, n] log-sum-exps of the queries of a pass, and two states of random numbers,
    which nothing reads without dropout."""
    call: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._flash_attention_forward
    return call(
        one.queries(query_NHD), one.keys(key_NKD), one.keys(value_NKD), one.bounds_q, one.bounds_k,
        one.longest_q, one.longest_k, 0.0, one.causal, False, scale=scale,
    )[:4]  # fmt: skip


def flash_backward(
    one: FlashPass, inputs: Inputs, grad_NHD: Tensor, out_NHD: Tensor, lse_HN: Tensor, rng: Sequence[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a pass's queries and keys, of the softmax over all passes that `lse_HN` normalises."""
    call: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.aten._flash_attention_backward
    query_NHD, key_NKD, value_NKD = inputs
    lse_Hn = lse_HN if one.queries_n is None else lse_HN.index_select(1, one.queries_n)
    return call(
        one.queries(grad_NHD), one.queries(query_NHD), one.keys(key_NKD), one.keys(value_NKD),
        one.queries(out_NHD), lse_Hn, one.bounds_q, one.bounds_k, one.longest_q, one.longest_k, 0.0,
        one.causal, *rng, scale=scale,
    )  # fmt: skip


class _TreeAttention(torch.autograd.Function):
    """All tensors as grouped views [K, G, n, D]: K key heads of G query heads each."""

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
        # nodes first, the layout that the projections read
        d_query_NHD = torch.empty_like(out_NHD, dtype=wide)
        d_key_NKD, d_value_NKD = (
            x.new_empty((x.shape[1], key_heads, x.shape[2]), dtype=wide) for x in (key_KND, value_KND)
        )
        d_query = _view(d_query_NHD, key_heads)
        d_key, d_value = d_key_NKD.transpose(0, 1), d_value_NKD.transpose(0, 1)

        def part(queries: slice, keys: slice, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
            inputs = query[:, :, queries], key[:, :, keys], value[:, :, keys]
            whole = out[:, :, queries], lse[:, :, queries]
            d_q, d_k, d_v = _attend_backward(
                grad[:, :, queries], inputs, *whole, causal=causal, scale=ctx.scale
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
        return d_query_NHD.transpose(0, 1).to(kind), d_key.to(kind), d_value.to(kind), None, None


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
    out = query.new_empty((*query.shape[:3], value.shape[-1]))
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    if query.device.type == "meta":  # a plan of memory, which needs the sizes alone
        return out, lse
    for rows, end in _blocks(query, key, causal):
        scores = _scores(query[:, :, rows], key[:, :, :end], rows.start if causal else None, scale)
        lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = (scores - lse[:, :, rows, None]).exp_().to(value.dtype) @ value[:, :, :end]
    return out, lse


_BLOCK_SCORES = 2**26
"""scores that exist at once off the CPU, in float32"""


def _blocks(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    count, width = query.shape[2], key.shape[2]
    size = max(1, _BLOCK_SCORES // (query.shape[0] * query.shape[1] * width))
    for start in range(0, count, size):
        end = min(start + size, count)
        yield slice(start, end), end if causal else width


def _attend_backward(
    grad: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each [K, G, n, D], of the softmax that `lse` normalises."""
    query, key, value = inputs
    if query.device.type == "cpu":
        flash: Callable[..., tuple[Tensor, Tensor, Tensor]]
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, query, key, value, out, lse.contiguous(), 0.0, causal, scale=scale)
    d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, key, value))
    for rows, end in _blocks(query, key, causal):
        seen, of = key[:, :, :end], grad[:, :, rows]
        scores = _scores(query[:, :, rows], seen, rows.start if causal else None, scale)
        weights = (scores - lse[:, :, rows, None]).exp_()
        inner = of @ value[:, :, :end].transpose(-1, -2) - (of * out[:, :, rows]).sum(-1, keepdim=True)
        d_scores = inner.mul_(weights).mul_(scale)
        d_query[:, :, rows] = d_scores @ seen
        d_key[:, :, :end] += d_scores.transpose(-1, -2) @ query[:, :, rows]
        d_value[:, :, :end] += weights.transpose(-1, -2) @ of
    return d_query, d_key, d_value


def _scores(query: Tensor, key: Tensor, first: int | None, scale: float) -> Tensor:
    """Scores in float32 or more; with `first`, the position of the first query, later keys are hidden."""
    scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if first is not None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(first + 1)
        scores.masked_fill_(hidden, float("-inf"))
    return scores
