"""Attention over KV that lies in place: a decoding step of many rows, and the reading of new tokens.

Shapes: B rows, N packed tokens, H query heads, K key heads, R = H / K, D of a head. Layers index the first
dimension of every KV tensor, and key and value its second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nano_coder.decoding.kv_cache import Arena, Trunk


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


class Trunks:
    """The trunks that the rows of a batch stand on, each read once for all of its rows.

    The queries of a trunk's rows are one block of queries, so that its keys and values pass through the
    processor once a step, however large the group.
    """

    def __init__(
        self, trunks_B: Sequence[Trunk], heads: int, keys: int, before: Trunks | None = None
    ) -> None:
        """`trunks_B`: what each row stands on. `before`: those of the last batch, whose block of KV is used
        again where it holds all that is needed and not much else."""
        self._distinct: list[Trunk] = list(dict.fromkeys(trunks_B))
        self._kv: Tensor
        self._mask: Tensor | None
        if before is not None and before._serves(self._distinct):
            self._distinct, self._kv, self._mask = before._distinct, before._kv, before._mask
        else:
            self._gather_kv(keys)
        self._place_queries(trunks_B, heads, keys)

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

    def attend(self, layer: int, q_BHD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """[B, H, D], and [B, H] log-sum-exps."""
        size, heads, dim = q_BHD.shape
        q = q_BHD.reshape(size * heads, dim).index_select(0, self._gather).view(*self._queries, dim)
        out, lse = attend(q, self._kv[layer, 0], self._kv[layer, 1], scale, self._mask)
        out_BHD = out.reshape(-1, dim).index_select(0, self._scatter).view(size, heads, dim)
        return out_BHD, lse.reshape(-1).index_select(0, self._scatter).view(size, heads)

    def _place_queries(self, trunks_B: Sequence[Trunk], heads: int, keys: int) -> None:
        """Where each query goes in [T, K, G * R], G the largest group, and where its answer is found."""
        members = [[row for row, trunk in enumerate(trunks_B) if trunk is one] for one in self._distinct]
        widest, rep = max(map(len, members)), heads // keys
        self._queries = (len(members), keys, widest * rep)
        # smaller groups are filled up with any row, whose answer nobody reads
        rows_TG = torch.tensor([rows + [0] * (widest - len(rows)) for rows in members])
        heads_KR = torch.arange(heads).view(keys, rep)
        gather_TKGR = rows_TG[:, None, :, None] * heads + heads_KR[None, :, None, :]
        at_TKGR = torch.arange(gather_TKGR.numel()).view(gather_TKGR.shape)
        scatter_BH = torch.empty((len(trunks_B), heads), dtype=torch.long)
        for one, rows in enumerate(members):
            for nth, row in enumerate(rows):
                scatter_BH[row] = at_TKGR[one, :, nth].flatten()
        device = trunks_B[0].kv.device
        self._gather, self._scatter = gather_TKGR.flatten().to(device), scatter_BH.flatten().to(device)


class DecodeAttention:
    """One step of B rows, a token each: the new keys are stored, then read with all that lies before."""

    def __init__(self, arena: Arena, lengths_B: Sequence[int], trunks: Trunks) -> None:
        """`lengths_B`: positions that each row's slot holds already."""
        self._arena = arena
        self._trunks = trunks
        self._size = len(lengths_B)
        self._places = arena.places(lengths_B)
        self._longest = max(lengths_B) + 1
        self._mask = _length_mask([length + 1 for length in lengths_B], arena.kv)

    def __call__(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, scale: float) -> Tensor:
        size, heads, dim = q_BHD.shape
        keys = k_BKD.shape[1]
        self._arena.write(layer, self._places, k_BKD, v_BKD)
        k, v = self._arena.kv[layer, :, : self._size, :, : self._longest]
        own, own_lse = attend(q_BHD.reshape(size, keys, heads // keys, dim), k, v, scale, self._mask)
        trunk_BHD, trunk_lse_BH = self._trunks.attend(layer, q_BHD, scale)
        # two parts of one softmax are weighed by the mass of their scores
        weight_BH1 = torch.sigmoid(trunk_lse_BH - own_lse.reshape(size, heads))[..., None]
        out = torch.lerp(own.reshape(size, heads, dim).float(), trunk_BHD.float(), weight_BH1)
        return out.to(q_BHD.dtype).view(size, heads * dim)


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
