"""The KV cache, and attention over it: one for decoding steps of many rows, one for prefill.

The cache holds shared prompt prefixes, the arena of the rows being decoded, and rows kept between turns. It
belongs to one version of the weights.

Shapes: B rows, N packed tokens or queries, H query heads, K key-value heads, R = H / K, D the size of a head,
P the length of a prefix. Every KV tensor is [L layers, 2 for key and value, ...].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ROUND = 64
"""positions by which the arena grows"""
_OWN_ROWS = 4
"""rows that are retained for one owner: as many as the places that repair-1 shows in turn"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    layers: int
    keys: int
    """key-value heads"""
    dim: int
    """size of a head"""
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.keys * self.dim * self.dtype.itemsize

    def zeros(self, *sizes: int) -> Tensor:
        """[L, 2, *sizes, D] of zeros: masked positions are multiplied too, so they must hold finite
        numbers."""
        shape = (self.layers, 2, *sizes, self.dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def lazy_zeros(self, *sizes: int) -> Tensor:
        """As `zeros`, for large blocks of which little may be used: on a CPU the operating system clears a
        page when it is first written."""
        shape = (self.layers, 2, *sizes, self.dim)
        size = math.prod(shape) * self.dtype.itemsize
        if self.device.type != "cpu" or not size:
            return self.zeros(*sizes)
        pages = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self.dtype).view(shape)


@dataclass(slots=True, eq=False)
class Prefix:
    """The KV of a token prefix that several rows may share. Not modified after its prefill."""

    ids: tuple[int, ...]
    """[P]"""
    kv: Tensor
    """[L, 2, K, P, D]; empty until it is prefilled"""
    logits_V: Tensor | None = None
    """[V] for the token after the prefix; None where no row needs them"""
    users: int = 0
    """rows, decoding or retained, that begin with this prefix"""


@dataclass(frozen=True, slots=True, eq=False)
class RetainedRow:
    """The KV of a finished row, kept for later turns of its owner."""

    ids: tuple[int, ...]
    """[M] tokens whose KV is kept, those of the prefix included"""
    prefix: Prefix
    kv: Tensor
    """[L, 2, K, M - P, D] of the tokens after the prefix"""


class ReusedRow(NamedTuple):
    """What a new row takes of a retained one: its prefix, and the first `length` positions after that."""

    row: RetainedRow
    length: int


class Arena:
    """KV of the rows being decoded: row b of the batch owns slot b of one block of memory."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.kv = shape.zeros(0, shape.keys, 0)
        """[L, 2, slots, K, capacity, D]"""

    def grown(self, slots: int, capacity: int) -> tuple[int, int]:
        """Slots and positions of the block with room for `slots` slots of `capacity` positions."""
        return max(slots, self.kv.shape[2]), max(-(-capacity // ROUND) * ROUND, self.kv.shape[4])

    def reserve(self, slots: int, capacity: int, used: int) -> None:
        """Grow to at least `slots` slots of `capacity` positions; the first `used` slots keep their contents.
        Old and new block live beside each other while they are copied."""
        old, have = self.kv[:, :, :used], self.kv.shape[4]
        slots, capacity = self.grown(slots, capacity)
        if (slots, capacity) == (self.kv.shape[2], have):
            return
        if not used:
            old = self.kv = self.kv[:, :, :0].clone()
        self.kv = self.shape.lazy_zeros(slots, self.shape.keys, capacity)
        self.kv[:, :, :used, :, :have] = old

    def slot(self, index: int) -> Tensor:
        return self.kv[:, :, index]

    def places(self, slots_N: Sequence[int], positions_N: Sequence[int]) -> Tensor:
        """[N * K] indices of each position and head into a layer viewed as [slots * K * capacity, D]."""
        keys, capacity = self.shape.keys, self.kv.shape[4]
        heads_NK = torch.tensor(slots_N)[:, None] * keys + torch.arange(keys)
        places_NK = heads_NK * capacity + torch.tensor(positions_N)[:, None]
        return places_NK.flatten().to(self.kv.device)

    def write(self, layer: int, places: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> None:
        """Store keys and values of new positions, at the indices that `places` returned."""
        for part, new in enumerate((k_NKD, v_NKD)):
            self.kv[layer, part].view(-1, self.shape.dim).index_copy_(
                0, places, new.reshape(-1, self.shape.dim)
            )


class PrefixCache:
    """Prefixes by their tokens, and retained rows by their owner, within a budget in bytes that the blocks of
    the rows being decoded share.

    An owner whose turns do not go on from each other, as one that is shown places one after another, has
    several rows. Eviction takes prefixes without users first, then the rows retained longest. What was
    evicted costs another prefill when it is needed again, and changes no result.
    """

    def __init__(self, shape: KVShape, max_bytes: int) -> None:
        self._token_bytes = shape.token_bytes
        self._max_bytes = max_bytes
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._retained: dict[RetainedRow, int] = {}
        """row -> its owner, the one retained longest first"""
        self.evictions = 0

    def get(self, ids: tuple[int, ...]) -> Prefix | None:
        return self._prefixes.get(ids)

    def longest_prefix(self, ids: tuple[int, ...], more: Sequence[Prefix] = ()) -> Prefix | None:
        fitting = [t for t in (*self._prefixes.values(), *more) if t.ids == ids[: len(t.ids)]]
        return max(fitting, key=lambda t: len(t.ids), default=None)

    def closest_prefix(self, ids: tuple[int, ...], more: Sequence[Prefix] = ()) -> tuple[Prefix | None, int]:
        """The prefix, cached or among `more`, with the most leading tokens in common with `ids`, and how many
        those are."""
        best: Prefix | None = None
        longest = 0
        for prefix in (*self._prefixes.values(), *more):
            if prefix.ids[:longest] == ids[:longest] and (common := common_prefix(prefix.ids, ids)) > longest:
                best, longest = prefix, common
        return best, longest

    def add(self, prefix: Prefix) -> None:
        self._prefixes[prefix.ids] = prefix

    def retain(self, owner: int, row: RetainedRow) -> None:
        """Keep a row for the owner's later requests, beside its last few."""
        for old in self._rows_of(owner)[: 1 - _OWN_ROWS]:
            self.drop(old)
        self._retained[row] = owner
        row.prefix.users += 1

    def retained(self, owner: int | None, ids: tuple[int, ...]) -> ReusedRow | None:
        """The owner's row with the most leading tokens in common with `ids`, if those are more than what a
        prefix has."""
        best, longest, rows = None, 0, self._rows_of(owner)
        if rows:
            _, longest = self.closest_prefix(ids)
        for row in rows:
            # the last token is always prefilled, for the logits after it
            common = min(common_prefix(row.ids, ids), len(ids) - 1)
            if common >= longest and common > len(row.prefix.ids):
                best, longest = ReusedRow(row, common - len(row.prefix.ids)), common
        return best

    def _rows_of(self, owner: int | None) -> list[RetainedRow]:
        return [row for row, owns in self._retained.items() if owns == owner]

    def release(self, owner: int) -> None:
        for row in self._rows_of(owner):
            self.drop(row)

    def drop(self, row: RetainedRow) -> None:
        if self._retained.pop(row, None) is not None:
            row.prefix.users -= 1

    def least(self, keep: Collection[Prefix | RetainedRow]) -> int:
        """Bytes of what cannot be removed: what is in `keep`, and the prefixes of rows being decoded."""
        rows = [row for row in self._retained if row in keep]
        prefixes = {one for one in keep if isinstance(one, Prefix)} | {row.prefix for row in rows}
        retained = Counter(row.prefix for row in self._retained)
        decoded = {prefix for prefix in self._prefixes.values() if prefix.users > retained[prefix]}
        return self._size(prefixes | decoded, rows)

    def evict(self, others: int, keep: Collection[Prefix | RetainedRow] = ()) -> bool:
        """Remove prefixes and rows until the rest, those in `keep` and `others` bytes keep the budget. False,
        and nothing is removed, where that cannot be."""
        kept = {one for one in keep if isinstance(one, Prefix)}
        if self._size(self._live(kept), self._retained) + others <= self._max_bytes:
            return True
        if self.least(keep) + others > self._max_bytes:
            return False
        rows = [row for row in self._retained if row not in keep]
        while self._size(self._live(kept), self._retained) + others > self._max_bytes:
            unused = next((p for p in self._prefixes.values() if not p.users and p not in kept), None)
            if unused is not None:
                del self._prefixes[unused.ids]
            else:
                self.drop(rows.pop(0))
            self.evictions += 1
        return True

    def _live(self, more: Collection[Prefix] = ()) -> set[Prefix]:
        return {*self._prefixes.values(), *(row.prefix for row in self._retained), *more}

    def _size(self, prefixes: Collection[Prefix], rows: Collection[RetainedRow]) -> int:
        tokens = sum(len(prefix.ids) for prefix in prefixes) + sum(row.kv.shape[3] for row in rows)
        return tokens * self._token_bytes

    @property
    def bytes(self) -> int:
        """Size of all prefixes and retained rows."""
        return self._size(self._live(), self._retained)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection: comparing slices is far quicker than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ------------------------------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scoring:
    """How a layer scores keys: `softcap * tanh(q k scale / softcap)`, over the nearest `window` positions."""

    scale: float
    window: int | None = None
    """positions that a query sees, its own included; None: all"""
    softcap: float | None = None
    sinks_H: Tensor | None = None
    """logit of each head that takes part in the softmax without a value (gpt-oss)"""

    @property
    def plain(self) -> bool:
        """True if PyTorch's attention can compute the scores."""
        return self.softcap is None and self.sinks_H is None


_BLOCK_SCORES = 1 << 24
"""number of scores that exist at once where PyTorch has no kernel that returns log-sum-exps"""
_PARALLEL = 16
"""rows times key heads from which on PyTorch's kernel, which reads the keys of each in turn, is faster"""
_ALIGNED = 8
"""elements that it reads of a mask at once"""


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scoring, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of [b, h, n, D] queries over [b, h, m, D] keys, and the [b, h, n] log-sum-exps of its scores.

    `mask` is added to the scores. With the log-sum-exps two partial softmaxes can be combined.
    """
    if q.device.type == "cpu" and scores.softcap is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scores.scale
        )
        return out, lse
    b, h, n, _ = q.shape
    if q.device.type == "cuda" and scores.softcap is None and b * h >= _PARALLEL and _aligned(mask):
        wide = None if mask is None else mask.expand(b, h, n, k.shape[2])
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, wide, True, scale=scores.scale
        )
        return out, lse[:, :, :n]
    rows = max(1, _BLOCK_SCORES // (b * h * k.shape[2]))
    parts = [
        _block(q[:, :, at : at + rows], k, v, scores, mask if mask is None or mask.shape[2] == 1 else
               mask[:, :, at : at + rows])
        for at in range(0, n, rows)
    ]  # fmt: skip
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _aligned(mask: Tensor | None) -> bool:
    """Whether PyTorch's memory-efficient attention reads this mask."""
    return mask is None or all(stride % _ALIGNED == 0 for stride in mask.stride()[:-1])


def _block(q: Tensor, k: Tensor, v: Tensor, how: Scoring, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-1, -2)).float() * how.scale
    if how.softcap is not None:
        scores = (scores / how.softcap).tanh() * how.softcap
    if mask is not None:
        scores = scores + mask.float()
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


class GroupedQueries:
    """N queries of H heads, arranged as [T, K, G * R] by the keys and values that they attend to.

    T groups of queries; G is the size of the largest group.
    """

    def __init__(
        self,
        members_T: Sequence[Sequence[int]],
        heads: int,
        keys: int,
        device: torch.device,
        *,
        size: int | None = None,
        widest: int | None = None,
    ) -> None:
        """`members_T`: indices of the queries of each group; no query is in two. `size`: number of queries,
        where some are in no group; their result is arbitrary. `widest`: G, where it shall be larger."""
        widest, rep = widest or max(map(len, members_T)), heads // keys
        self._shape = (len(members_T), keys, widest * rep)
        # smaller groups are padded with some query, whose result is not used
        queries_TG = torch.tensor([[*one, *[-1] * (widest - len(one))] for one in members_T])
        heads_KR = torch.arange(heads).view(keys, rep)
        gather_TKGR = queries_TG.clamp(min=0)[:, None, :, None] * heads + heads_KR[None, :, None, :]
        at_TKGR = torch.arange(gather_TKGR.numel()).view(gather_TKGR.shape)
        real_TG = queries_TG >= 0
        scatter_NH = torch.zeros((size or int(real_TG.sum()), heads), dtype=torch.long)
        scatter_NH[queries_TG[real_TG]] = at_TKGR.transpose(1, 2)[real_TG].flatten(1)
        self._gather, self._scatter = gather_TKGR.flatten().to(device), scatter_NH.flatten().to(device)

    def copy_(self, other: GroupedQueries) -> None:
        self._gather.copy_(other._gather)
        self._scatter.copy_(other._scatter)

    def arranged(self, values_N: Tensor) -> Tensor:
        """[T, 1, G * R, 1] a number of each query, where its scores are."""
        heads = self._scatter.numel() // values_N.numel()
        first = self._gather.view(self._shape)[:, :1] // heads
        return values_N[first.to(values_N.device)][..., None]

    def attend(
        self, q_NHD: Tensor, k: Tensor, v: Tensor, scores: Scoring, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[N, H, D] queries over the [T, K, m, D] keys of their groups: [N, H, D], and [N, H]
        log-sum-exps."""
        size, heads, dim = q_NHD.shape
        q = q_NHD.reshape(size * heads, dim).index_select(0, self._gather).view(*self._shape, dim)
        out, lse = attend(q, k, v, scores, mask)
        out_NHD = out.reshape(-1, dim).index_select(0, self._scatter).view(size, heads, dim)
        return out_NHD, lse.reshape(-1).index_select(0, self._scatter).view(size, heads)


class SharedPrefixes:
    """The shared prefixes of one step's rows. A prefix is loaded once a step, however many rows share it."""

    def __init__(
        self, prefixes_N: Sequence[Prefix], heads: int, keys: int, before: SharedPrefixes | None = None
    ) -> None:
        """`prefixes_N`: the prefix of each query. `before`: those of the last step; its block of KV is used
        again if it contains these prefixes and is less than twice as large."""
        self.distinct: list[Prefix] = list(dict.fromkeys(prefixes_N))
        self.kv: Tensor
        """[L, 2, T, K, longest, D] of T prefixes"""
        self._mask: Tensor | None
        if before is not None and before.covers(self.distinct):
            self.distinct, self.kv, self._mask = before.distinct, before.kv, before._mask
        else:
            self._gather_kv(keys)
        self._members = [
            [at for at, prefix in enumerate(prefixes_N) if prefix is one] for one in self.distinct
        ]
        self._heads = heads, keys
        self._grouped = GroupedQueries(self._members, heads, keys, prefixes_N[0].kv.device)

    @property
    def widest(self) -> int:
        """Number of queries of the prefix that has most."""
        return max(map(len, self._members))

    def padded(self, size: int, widest: int) -> SharedPrefixes:
        """The same for `size` queries, at most `widest` of each prefix; the shapes depend on these alone."""
        other = copy(self)
        device = self.kv.device
        other._grouped = GroupedQueries(self._members, *self._heads, device, size=size, widest=widest)
        return other

    def regroup(self, other: SharedPrefixes) -> None:
        self._grouped.copy_(other._grouped)

    @property
    def copied(self) -> int:
        """Bytes of the copies of its prefixes."""
        return self.kv.nbytes if len(self.distinct) > 1 else 0

    def covers(self, prefixes: Collection[Prefix]) -> bool:
        """Whether its block of KV serves these distinct prefixes."""
        return set(prefixes) <= set(self.distinct) and len(self.distinct) < 2 * len(prefixes)

    def _gather_kv(self, keys: int) -> None:
        """Copy keys and values into one padded block; a single prefix is used in place."""
        distinct = self.distinct
        lengths = [len(prefix.ids) for prefix in distinct]
        first = distinct[0].kv
        self._mask = _length_mask(lengths, first)
        self.kv = first[:, :, None]
        if len(distinct) > 1:
            layers, two, _, _, dim = first.shape
            self.kv = first.new_zeros((layers, two, len(distinct), keys, max(lengths), dim))
            for one, prefix in enumerate(distinct):
                self.kv[:, :, one, :, : lengths[one]] = prefix.kv

    def window_mask(self, window: int, positions_N: Tensor) -> Tensor:
        """The mask of the prefix for queries at these positions that see `window` of them."""
        since = self._grouped.arranged(positions_N - window + 1)
        return _hidden_before(since, self.kv.shape[-2], self.kv, self._mask)

    def attend(
        self, layer: int, q_NHD: Tensor, scores: Scoring, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention of each query over its prefix: [N, H, D], and [N, H] log-sum-exps. `mask`: in place of
        that of the lengths."""
        kept = self._mask if mask is None else mask
        return self._grouped.attend(q_NHD, self.kv[layer, 0], self.kv[layer, 1], scores, kept)


class DecodeAttention:
    """Attention of one decoding step: stores the new tokens of B rows, then attends to all tokens so far."""

    def __init__(
        self,
        arena: Arena,
        lengths_B: Sequence[int],
        counts_B: Sequence[int],
        prefixes: SharedPrefixes,
        heads: int,
        positions_N: Tensor | None = None,
        windows: Collection[int] = (),
    ) -> None:
        """`lengths_B`: positions already in each row's slot. `counts_B`: new tokens of each row, N in all;
        `prefixes` has one entry for each of the N. `positions_N` are needed with `windows`, the sizes that
        layers attend to."""
        self._arena = arena
        self._prefixes = prefixes
        self._rows = len(lengths_B)
        slots = [slot for slot, count in enumerate(counts_B) for _ in range(count)]
        seen = [
            length + nth + 1
            for length, count in zip(lengths_B, counts_B, strict=True)
            for nth in range(count)
        ]
        self._places = arena.places(slots, [length - 1 for length in seen])
        self._longest = max(seen)
        self._grouped: GroupedQueries | None = None
        self._window_masks: dict[int, tuple[Tensor, Tensor]] = {}
        self._own_masks(slots, seen, counts_B, heads)
        for window in windows:
            assert positions_N is not None
            # positions in the slot of the first key that a query sees
            since_N = torch.tensor(seen, device=positions_N.device) - window
            since = since_N[:, None, None, None] if self._grouped is None else self._grouped.arranged(since_N)
            self._window_masks[window] = (
                _hidden_before(since, self._longest, arena.kv, self._mask),
                prefixes.window_mask(window, positions_N),
            )

    @classmethod
    def of_tensors(
        cls, arena: Arena, seen_B: Tensor, longest: int, prefixes: SharedPrefixes
    ) -> DecodeAttention:
        """Attention of one new token of each row, whose lengths are read where it is computed: no number
        leaves the device. `seen_B`: positions in each slot, the new one included, at most `longest`."""
        one = cls.__new__(cls)
        one._arena, one._prefixes, one._rows, one._longest = arena, prefixes, len(seen_B), longest
        keys, capacity, device = arena.shape.keys, arena.kv.shape[4], seen_B.device
        heads_BK = torch.arange(len(seen_B) * keys, device=device).view(-1, keys)
        one._places = (heads_BK * capacity + (seen_B - 1)[:, None]).flatten()
        past_BL = torch.arange(longest, device=device) >= seen_B[:, None]
        mask_BL = torch.zeros(past_BL.shape, dtype=arena.kv.dtype, device=device)
        one._mask = mask_BL.masked_fill_(past_BL, -torch.inf)[:, None, None]
        one._grouped, one._window_masks = None, {}
        return one

    def _own_masks(
        self, slots: Sequence[int], seen: Sequence[int], counts_B: Sequence[int], heads: int
    ) -> None:
        """The mask of the slots; rows of several tokens are grouped."""
        arena = self._arena
        if len(slots) == self._rows:
            self._mask = _length_mask(seen, arena.kv)
            return
        ends = list(accumulate(counts_B))
        members = [range(end - count, end) for end, count in zip(ends, counts_B, strict=True)]
        widest, keys = max(counts_B), arena.shape.keys
        self._grouped = GroupedQueries(members, heads, keys, arena.kv.device)
        # padding queries of rows with fewer tokens: any mask will do
        lengths = [
            seen[end - count + min(nth, count - 1)]
            for end, count in zip(ends, counts_B, strict=True)
            for nth in range(widest)
        ]
        mask = _length_mask(lengths, arena.kv)
        if mask is not None:
            mask = mask.view(self._rows, 1, widest, -1).repeat_interleave(heads // keys, dim=2)
        self._mask = mask

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scoring) -> Tensor:
        size, heads, dim = q_NHD.shape
        keys = k_NKD.shape[1]
        mask, prefix_mask = self._mask, None
        if scores.window is not None:
            mask, prefix_mask = self._window_masks[scores.window]
        self._arena.write(layer, self._places, k_NKD, v_NKD)
        k, v = self._arena.kv[layer, :, : self._rows, :, : self._longest]
        if self._grouped is None:
            q = q_NHD.reshape(size, keys, heads // keys, dim)
            own, own_lse = attend(q, k, v, scores, mask)
        else:
            own, own_lse = self._grouped.attend(q_NHD, k, v, scores, mask)
        prefix_NHD, prefix_lse_NH = self._prefixes.attend(layer, q_NHD, scores, prefix_mask)
        # combine the two partial softmaxes by the sum of their exponentiated scores
        own_lse_NH = own_lse.reshape(size, heads)
        weight_NH1 = torch.sigmoid(prefix_lse_NH - own_lse_NH)[..., None]
        out = torch.lerp(own.reshape(size, heads, dim).float(), prefix_NHD.float(), weight_NH1)
        if scores.sinks_H is not None:
            lse_NH = torch.logaddexp(prefix_lse_NH, own_lse_NH)
            out = out * torch.sigmoid(lse_NH - scores.sinks_H.float())[..., None]
        return out.to(q_NHD.dtype).view(size, heads * dim)


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSegment:
    """Tokens of one row or prefix that are not yet in the KV cache."""

    ids: tuple[int, ...]
    """[n]"""
    kv: Tensor
    """[L, 2, K, capacity, D] that their keys and values are written to"""
    start: int
    """number of positions already in `kv`"""
    prefix: Prefix | None = None
    """shared prefix that precedes `kv`"""

    @property
    def position(self) -> int:
        """Position of the first new token in the whole row."""
        return self.start + (len(self.prefix.ids) if self.prefix else 0)


class PrefillAttention:
    """Attention of a prefill pass: linear layers see all segments as one batch of tokens, attention each
    alone."""

    def __init__(self, segments: Sequence[PrefillSegment]) -> None:
        self._parts: list[tuple[PrefillSegment, int, int]] = []
        self._masks: dict[tuple[int, int | None, bool], Tensor | None] = {}
        end = 0
        for segment in segments:
            begin, end = end, end + len(segment.ids)
            self._parts.append((segment, begin, end))

    def _mask(self, part: int, scores: Scoring) -> Tensor | None:
        """The causal mask of a segment, made once for all layers that score alike."""
        kind = (part, scores.window, scores.plain)
        if kind not in self._masks:
            self._masks[kind] = _causal_mask(self._parts[part][0], scores)
        return self._masks[kind]

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scores: Scoring) -> Tensor:
        tokens, heads, dim = q_NHD.shape
        out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
        for part, (segment, begin, end) in enumerate(self._parts):
            mask = self._mask(part, scores)
            kv = segment.kv[layer]
            stop = segment.start + end - begin
            kv[0, :, segment.start : stop] = k_NKD[begin:end].transpose(0, 1)
            kv[1, :, segment.start : stop] = v_NKD[begin:end].transpose(0, 1)
            seen = kv[:, :, :stop]
            if segment.prefix is not None:
                seen = torch.cat([segment.prefix.kv[layer], seen], dim=2)
            k, v = seen.repeat_interleave(heads // seen.shape[1], dim=1)[:, None]
            q = q_NHD[begin:end].transpose(0, 1)[None]
            if scores.plain:
                out = F.scaled_dot_product_attention(
                    q, k, v, mask, is_causal=mask is None, scale=scores.scale
                )
            else:
                out, lse = attend(q, k, v, scores, mask)
                if scores.sinks_H is not None:
                    out = out * torch.sigmoid(lse - scores.sinks_H.float()[:, None])[..., None].to(out.dtype)
            out_NHD[begin:end] = out[0].transpose(0, 1)
        return out_NHD.view(tokens, heads * dim)


def _length_mask(lengths: Sequence[int], kv: Tensor) -> Tensor | None:
    """[B, 1, 1, longest] with minus infinity at and after each length; None if all lengths are equal."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    padded = -(-longest // _ALIGNED) * _ALIGNED
    past = torch.arange(padded)[None] >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(past.shape, dtype=kv.dtype).masked_fill_(past, -torch.inf).to(kv.device)
    return mask[:, None, None, :longest]


def _hidden_before(since: Tensor, size: int, kv: Tensor, mask: Tensor | None) -> Tensor:
    """`mask`, or none, with keys before `since` hidden from its queries.

    By a number instead of minus infinity: a query may see no key of its prefix, and a softmax needs one.
    """
    early = torch.arange(size, device=since.device) < since
    hidden = torch.zeros(early.shape, dtype=kv.dtype, device=since.device)
    hidden.masked_fill_(early, torch.finfo(kv.dtype).min / 4)
    return hidden if mask is None else hidden + mask


def _causal_mask(segment: PrefillSegment, scores: Scoring) -> Tensor | None:
    """[1, 1, n, m] with minus infinity on later tokens and those before the window; None for a segment at
    position 0 whose queries see all before (see `is_causal`)."""
    count, start = len(segment.ids), segment.position
    whole = scores.window is None or scores.window >= start + count
    if start == 0 and whole and scores.plain:
        return None
    mask = torch.full((count, start + count), -torch.inf, dtype=segment.kv.dtype, device=segment.kv.device)
    mask.triu_(start + 1)
    if not whole and scores.window is not None:
        far = torch.ones(mask.shape, dtype=torch.bool, device=mask.device).tril_(start - scores.window)
        mask.masked_fill_(far, -torch.inf)
    return mask[None, None]
