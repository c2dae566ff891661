"""The KV cache: prompts stored once, rows being decoded in one block of memory, waiting rows beside it.

Shapes: L layers, 2 for key and value, K key heads, D of a head. Nothing here outlives a version of the
weights: whoever changes them calls `clear`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

_ROUND = 64
"""positions by which the arena grows"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    layers: int
    keys: int
    """key heads"""
    dim: int
    """of a head"""
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.keys * self.dim * self.dtype.itemsize

    def zeros(self, *sizes: int) -> Tensor:
        """[L, 2, *sizes, D]; zeros and not empty, because masked positions are multiplied all the same."""
        shape = (self.layers, 2, *sizes, self.dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def untouched(self, *sizes: int) -> Tensor:
        """The same, for a block of which little may come to be used: on a CPU, pages that nobody has written
        to take neither time nor memory."""
        shape = (self.layers, 2, *sizes, self.dim)
        size = math.prod(shape) * self.dtype.itemsize
        if self.device.type != "cpu" or not size:
            return self.zeros(*sizes)
        pages = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self.dtype).view(shape)


@dataclass(slots=True, eq=False)
class Trunk:
    """The KV of a token prefix that rows stand on. Never modified once it is read."""

    ids: tuple[int, ...]
    """[P]"""
    kv: Tensor
    """[L, 2, K, P, D]"""
    logits_V: Tensor | None = None
    """of the token after it"""
    users: int = 0
    """rows, decoding or waiting, that stand on it"""


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """A row that waits for its next turn."""

    ids: tuple[int, ...]
    """[M] tokens whose KV is kept, those of its trunk included"""
    trunk: Trunk
    kv: Tensor
    """[L, 2, K, M - P, D] behind the trunk"""


class Arena:
    """The rows being decoded: row b of the batch owns slot b of one block, however long the others are."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self.kv = shape.zeros(0, shape.keys, 0)
        """[L, 2, slots, K, capacity, D]"""

    def reserve(self, slots: int, capacity: int, used: int) -> None:
        """Room for that many rows of that many positions; what the first `used` slots hold stays."""
        capacity = -(-capacity // _ROUND) * _ROUND
        have_slots, have = self.kv.shape[2], self.kv.shape[4]
        if slots <= have_slots and capacity <= have:
            return
        old = self.kv
        self.kv = self.shape.untouched(max(slots, have_slots), self.shape.keys, max(capacity, have))
        self.kv[:, :, :used, :, :have] = old[:, :, :used]

    def slot(self, index: int) -> Tensor:
        """[L, 2, K, capacity, D] of one row, in place."""
        return self.kv[:, :, index]

    def load(self, index: int, kv: Tensor) -> None:
        self.kv[:, :, index, :, : kv.shape[3]] = kv

    def copy(self, index: int, length: int) -> Tensor:
        return self.kv[:, :, index, :, :length].clone()

    def move(self, source: int, target: int, length: int) -> None:
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

    def places(self, slots_N: Sequence[int], positions_N: Sequence[int]) -> Tensor:
        """[N * K] where each position and head lies in a layer's [slots * K * capacity, D]."""
        keys, capacity = self.shape.keys, self.kv.shape[4]
        heads_NK = torch.tensor(slots_N)[:, None] * keys + torch.arange(keys)
        places_NK = heads_NK * capacity + torch.tensor(positions_N)[:, None]
        return places_NK.flatten().to(self.kv.device)

    def write(self, layer: int, places: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> None:
        """Store new positions."""
        for part, new in enumerate((k_NKD, v_NKD)):
            self.kv[layer, part].view(-1, self.shape.dim).index_copy_(
                0, places, new.reshape(-1, self.shape.dim)
            )


class PrefixCache:
    """KV that may be read again: prompts by their tokens, waiting rows by their owner, within a budget.

    Over the budget, prompts that no row stands on go first, then the rows that have waited longest; what
    was given up is read again, which changes nothing but the time.
    """

    def __init__(self, shape: KVShape, max_bytes: int) -> None:
        self._token_bytes = shape.token_bytes
        self._max_bytes = max_bytes
        self._trunks: dict[tuple[int, ...], Trunk] = {}
        self._parked: dict[int, Parked] = {}
        self.evictions = 0

    def trunk(self, ids: tuple[int, ...]) -> Trunk | None:
        """The trunk of exactly these tokens."""
        return self._trunks.get(ids)

    def base(self, ids: tuple[int, ...]) -> Trunk | None:
        """The longest trunk that these tokens begin with."""
        fitting = [t for t in self._trunks.values() if t.ids == ids[: len(t.ids)]]
        return max(fitting, key=lambda t: len(t.ids), default=None)

    def nearest(self, ids: tuple[int, ...]) -> tuple[Trunk | None, int]:
        """The trunk that shares the longest prefix with these tokens, and the length of that prefix."""
        best: Trunk | None = None
        longest = 0
        for trunk in self._trunks.values():
            if trunk.ids[:longest] == ids[:longest] and (common := common_prefix(trunk.ids, ids)) > longest:
                best, longest = trunk, common
        return best, longest

    def add(self, trunk: Trunk) -> None:
        self._trunks[trunk.ids] = trunk

    def park(self, owner: int, row: Parked) -> None:
        """Keep a row for its owner's next request; the row that it kept before goes."""
        self.release(owner)
        self._parked[owner] = row
        row.trunk.users += 1
        self.evict()

    def parked(self, owner: int | None, ids: tuple[int, ...]) -> Parked | None:
        """The owner's row, if these tokens extend it."""
        row = self._parked.get(owner) if owner is not None else None
        extends = row is not None and len(row.ids) < len(ids) and ids[: len(row.ids)] == row.ids
        return row if extends else None

    def release(self, owner: int) -> None:
        row = self._parked.pop(owner, None)
        if row is not None:
            row.trunk.users -= 1

    def evict(self) -> None:
        """Give up what is over the budget."""
        excess = self.bytes - self._max_bytes
        for trunk in [t for t in self._trunks.values() if t.users == 0]:
            if excess <= 0:
                return
            del self._trunks[trunk.ids]
            excess -= len(trunk.ids) * self._token_bytes
            self.evictions += 1
        for owner in list(self._parked):
            if excess <= 0:
                return
            excess -= self._parked[owner].kv.shape[3] * self._token_bytes
            self.release(owner)
            self.evictions += 1

    def clear(self) -> None:
        self._trunks.clear()
        self._parked.clear()

    @property
    def bytes(self) -> int:
        """Of all that is kept."""
        trunks = sum(len(trunk.ids) for trunk in self._trunks.values())
        return (trunks + sum(row.kv.shape[3] for row in self._parked.values())) * self._token_bytes


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest prefix that both share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection: comparing slices is far quicker than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
