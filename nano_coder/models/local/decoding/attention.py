"""Attention over KV that lies in place: a decoding step of many rows, and the reading of new tokens.

Shapes: B rows, N packed tokens or queries, H query heads, K key heads, R = H / K, D of a head. Layers index
the first dimension of every KV tensor, and key and value its second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from nano_coder.models.local.decoding.kv_cache import Arena, Trunk


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of [b, h, n, D] queries over [b, h, m, D], and [b, h, n] log-sum-exps of its scores.

    `mask` is added to the scores. The log-sum-exps let two parts of a softmax be put together.
    """
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask.float()
    lse = scores.logsumexp(dim=-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


class Blocks:
    """Queries that read the same keys and values, put side by side: N queries of H heads as [T, K, G * R],
    T groups, G queries in the largest."""

    def __init__(
        self, members_T: Sequence[Sequence[int]], heads: int, keys: int, device: torch.device
    ) -> None:
        """`members_T`: the queries of each group; every query is in one of them."""
        widest, rep = max(map(len, members_T)), heads // keys
        self._shape = (len(members_T), keys, widest * rep)
        # smaller groups are filled up with any query, whose answer nobody reads
        queries_TG = torch.tensor([[*one, *[-1] * (widest - len(one))] for one in members_T])
        heads_KR = torch.arange(heads).view(keys, rep)
        gather_TKGR = queries_TG.clamp(min=0)[:, None, :, None] * heads + heads_KR[None, :, None, :]
        at_TKGR = torch.arange(gather_TKGR.numel()).view(gather_TKGR.shape)
        real_TG = queries_TG >= 0
        scatter_NH = torch.empty((int(real_TG.sum()), heads), dtype=torch.long)
        scatter_NH[queries_TG[real_TG]] = at_TKGR.transpose(1, 2)[real_TG].flatten(1)
        self._gather, self._scatter = gather_TKGR.flatten().to(device), scatter_NH.flatten().to(device)

    def attend(
        self, q_NHD: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[N, H, D] over the [T, K, m, D] of each group, and [N, H] log-sum-exps."""
        size, heads, dim = q_NHD.shape
        q = q_NHD.reshape(size * heads, dim).index_select(0, self._gather).view(*self._shape, dim)
        out, lse = attend(q, k, v, scale, mask)
        out_NHD = out.reshape(-1, dim).index_select(0, self._scatter).view(size, heads, dim)
        return out_NHD, lse.reshape(-1).index_select(0, self._scatter).view(size, heads)


class Trunks:
    """The trunks that the queries of a step stand on, each read once for all of its queries: its keys and
    values pass through the processor once a step, however large the group."""

    def __init__(
        self, trunks_N: Sequence[Trunk], heads: int, keys: int, before: Trunks | None = None
    ) -> None:
        """`trunks_N`: what each query stands on. `before`: those of the last step, whose block of KV is used
        again where it holds all that is needed and not much else."""
        self._distinct: list[Trunk] = list(dict.fromkeys(trunks_N))
        self._kv: Tensor
        self._mask: Tensor | None
        if before is not None and before._serves(self._distinct):
            self._distinct, self._kv, self._mask = before._distinct, before._kv, before._mask
        else:
            self._gather_kv(keys)
        members = [[at for at, trunk in enumerate(trunks_N) if trunk is one] for one in self._distinct]
        self._blocks = Blocks(members, heads, keys, trunks_N[0].kv.device)

    def _serves(self, trunks: list[Trunk]) -> bool:
        return set(trunks) <= set(self._distinct) and len(self._distinct) < 2 * len(trunks)

    def _gather_kv(self, keys: int) -> None:
        """One block of keys and values; a single trunk is read where it lies."""
        distinct = self._distinct
        lengths = [len(trunk.ids) for trunk in distinct]
        first = distinct[0].kv
        self._mask = _length_mask(lengths, first)
        self._kv = first[:, :, None]
        if len(distinct) > 1:
            layers, two, _, _, dim = first.shape
            self._kv = first.new_zeros((layers, two, len(distinct), keys, max(lengths), dim))
            for one, trunk in enumerate(distinct):
                self._kv[:, :, one, :, : lengths[one]] = trunk.kv

    def attend(self, layer: int, q_NHD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """[N, H, D], and [N, H] log-sum-exps."""
        return self._blocks.attend(q_NHD, self._kv[layer, 0], self._kv[layer, 1], scale, self._mask)


class DecodeAttention:
    """One step of B rows, of a token or a few each: the new keys are stored, then read with all before."""

    def __init__(
        self, arena: Arena, lengths_B: Sequence[int], counts_B: Sequence[int], trunks: Trunks, heads: int
    ) -> None:
        """`lengths_B`: positions that each row's slot holds already. `counts_B`: tokens of each row, N in
        all; `trunks` are those of the N."""
        self._arena = arena
        self._trunks = trunks
        self._rows = len(lengths_B)
        slots = [slot for slot, count in enumerate(counts_B) for _ in range(count)]
        seen = [
            length + nth + 1
            for length, count in zip(lengths_B, counts_B, strict=True)
            for nth in range(count)
        ]
        self._places = arena.places(slots, [length - 1 for length in seen])
        self._longest = max(seen)
        self._blocks: Blocks | None = None
        if len(slots) == self._rows:
            self._mask = _length_mask(seen, arena.kv)
            return
        ends = list(accumulate(counts_B))
        members = [range(end - count, end) for end, count in zip(ends, counts_B, strict=True)]
        widest, keys = max(counts_B), arena.shape.keys
        self._blocks = Blocks(members, heads, keys, arena.kv.device)
        # fillers of a row with fewer tokens may see what they like
        lengths = [
            length + min(nth, count - 1) + 1
            for length, count in zip(lengths_B, counts_B, strict=True)
            for nth in range(widest)
        ]
        mask = _length_mask(lengths, arena.kv)
        if mask is not None:
            mask = mask.view(self._rows, 1, widest, -1).repeat_interleave(heads // keys, dim=2)
        self._mask = mask

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        size, heads, dim = q_NHD.shape
        keys = k_NKD.shape[1]
        self._arena.write(layer, self._places, k_NKD, v_NKD)
        k, v = self._arena.kv[layer, :, : self._rows, :, : self._longest]
        if self._blocks is None:
            q = q_NHD.reshape(size, keys, heads // keys, dim)
            own, own_lse = attend(q, k, v, scale, self._mask)
        else:
            own, own_lse = self._blocks.attend(q_NHD, k, v, scale, self._mask)
        trunk_NHD, trunk_lse_NH = self._trunks.attend(layer, q_NHD, scale)
        # two parts of one softmax are weighed by the mass of their scores
        weight_NH1 = torch.sigmoid(trunk_lse_NH - own_lse.reshape(size, heads))[..., None]
        out = torch.lerp(own.reshape(size, heads, dim).float(), trunk_NHD.float(), weight_NH1)
        return out.to(q_NHD.dtype).view(size, heads * dim)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """New tokens of one row or trunk, to be read behind what its KV holds."""

    ids: tuple[int, ...]
    """[n] the tokens"""
    kv: Tensor
    """[L, 2, K, capacity, D] where their keys and values are stored"""
    start: int
    """positions that `kv` holds already"""
    trunk: Trunk | None = None
    """what lies before `kv`"""

    @property
    def position(self) -> int:
        """Of the first new token in the whole row."""
        return self.start + (len(self.trunk.ids) if self.trunk else 0)


class ReadAttention:
    """Packed tokens of several segments: linear layers see them as one block, attention one by one."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._parts: list[tuple[Segment, int, int, Tensor | None]] = []
        end = 0
        for segment in segments:
            begin, end = end, end + len(segment.ids)
            self._parts.append((segment, begin, end, _causal_mask(segment)))

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float) -> Tensor:
        tokens, heads, dim = q_NHD.shape
        out_NHD = torch.empty_like(q_NHD, memory_format=torch.contiguous_format)
        for segment, begin, end, mask in self._parts:
            kv = segment.kv[layer]
            stop = segment.start + end - begin
            kv[0, :, segment.start : stop] = k_NKD[begin:end].transpose(0, 1)
            kv[1, :, segment.start : stop] = v_NKD[begin:end].transpose(0, 1)
            seen = kv[:, :, :stop]
            if segment.trunk is not None:
                seen = torch.cat([segment.trunk.kv[layer], seen], dim=2)
            k, v = seen.repeat_interleave(heads // seen.shape[1], dim=1)[:, None]
            q = q_NHD[begin:end].transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
            out_NHD[begin:end] = out[0].transpose(0, 1)
        return out_NHD.view(tokens, heads * dim)


def _length_mask(lengths: Sequence[int], kv: Tensor) -> Tensor | None:
    """[B, 1, 1, longest], minus infinity past each length; None where all are equal."""
    longest = max(lengths)
    if min(lengths) == longest:
        return None
    past = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
    mask = torch.zeros(past.shape, dtype=kv.dtype).masked_fill_(past, -torch.inf)
    return mask[:, None, None].to(kv.device)


def _causal_mask(segment: Segment) -> Tensor | None:
    """[n, m], minus infinity on later tokens; None where nothing lies before, which needs none."""
    if segment.position == 0:
        return None
    count = len(segment.ids)
    mask = torch.full((count, segment.position + count), -torch.inf, dtype=segment.kv.dtype)
    return mask.triu_(segment.position + 1).to(segment.kv.device)
