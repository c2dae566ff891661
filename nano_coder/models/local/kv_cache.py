"""The KV cache: shared prompt prefixes, the arena of the rows being decoded, and rows kept between turns.

Shapes: L layers, 2 for key and value, K key-value heads, D the size of a head, P the length of a prefix. A
cache belongs to one version of the weights: whoever changes the weights calls `clear`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

ROUND = 64
"""positions by which the arena grows"""


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
        """As `zeros`; on a CPU the operating system allocates and clears a page only when it is first
        written.

        For large blocks of which little may be used.
        """
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
    """The KV of a finished row, kept for the next turn of its owner."""

    ids: tuple[int, ...]
    """[M] tokens whose KV is kept, those of the prefix included"""
    prefix: Prefix
    kv: Tensor
    """[L, 2, K, M - P, D] of the tokens after the prefix"""


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
        """[L, 2, K, capacity, D] of one slot, as a view."""
        return self.kv[:, :, index]

    def load(self, index: int, kv: Tensor) -> None:
        self.kv[:, :, index, :, : kv.shape[3]] = kv

    def copy(self, index: int, length: int) -> Tensor:
        return self.kv[:, :, index, :, :length].clone()

    def move(self, source: int, target: int, length: int) -> None:
        self.kv[:, :, target, :, :length] = self.kv[:, :, source, :, :length]

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

    Eviction takes prefixes without users first, then the rows retained longest. What was evicted costs
    another prefill when it is needed again, and changes no result.
    """

    def __init__(self, shape: KVShape, max_bytes: int) -> None:
        self._token_bytes = shape.token_bytes
        self._max_bytes = max_bytes
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._retained: dict[int, RetainedRow] = {}
        self.evictions = 0

    def get(self, ids: tuple[int, ...]) -> Prefix | None:
        """The prefix of exactly these tokens."""
        return self._prefixes.get(ids)

    def longest_prefix(self, ids: tuple[int, ...], more: Sequence[Prefix] = ()) -> Prefix | None:
        """The longest prefix of these tokens that is cached, or among `more`."""
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
        """Keep a row for its owner's next request, in place of the owner's earlier one."""
        self.release(owner)
        self._retained[owner] = row
        row.prefix.users += 1

    def retained(self, owner: int | None, ids: tuple[int, ...]) -> RetainedRow | None:
        """The row retained for this owner, if `ids` extends it."""
        row = self._retained.get(owner) if owner is not None else None
        extends = row is not None and len(row.ids) < len(ids) and ids[: len(row.ids)] == row.ids
        return row if extends else None

    def release(self, owner: int) -> None:
        """Forget the row retained for this owner."""
        row = self._retained.pop(owner, None)
        if row is not None:
            row.prefix.users -= 1

    def least(self, keep: Collection[Prefix | RetainedRow]) -> int:
        """Bytes of what cannot be removed: what is in `keep`, and the prefixes of rows being decoded."""
        rows = [row for row in self._retained.values() if row in keep]
        prefixes = {one for one in keep if isinstance(one, Prefix)} | {row.prefix for row in rows}
        retained = Counter(row.prefix for row in self._retained.values())
        decoded = {prefix for prefix in self._prefixes.values() if prefix.users > retained[prefix]}
        return self._size(prefixes | decoded, rows)

    def evict(self, others: int, keep: Collection[Prefix | RetainedRow] = ()) -> bool:
        """Remove prefixes and rows until the rest, those in `keep` and `others` bytes keep the budget. False,
        and nothing is removed, where that cannot be."""
        kept = {one for one in keep if isinstance(one, Prefix)}
        if self._size(self._live(kept), self._retained.values()) + others <= self._max_bytes:
            return True
        if self.least(keep) + others > self._max_bytes:
            return False
        owners = [owner for owner, row in self._retained.items() if row not in keep]
        while self._size(self._live(kept), self._retained.values()) + others > self._max_bytes:
            unused = next((p for p in self._prefixes.values() if not p.users and p not in kept), None)
            if unused is not None:
                del self._prefixes[unused.ids]
            else:
                self.release(owners.pop(0))
            self.evictions += 1
        return True

    def _live(self, more: Collection[Prefix] = ()) -> set[Prefix]:
        return {*self._prefixes.values(), *(row.prefix for row in self._retained.values()), *more}

    def _size(self, prefixes: Collection[Prefix], rows: Collection[RetainedRow]) -> int:
        tokens = sum(len(prefix.ids) for prefix in prefixes) + sum(row.kv.shape[3] for row in rows)
        return tokens * self._token_bytes

    @property
    def bytes(self) -> int:
        """Size of all prefixes and retained rows."""
        return self._size(self._live(), self._retained.values())


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that both sequences share."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # bisection: comparing slices is far quicker than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
