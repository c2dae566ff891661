"""Continuous batching: rows join and leave the decoding batch at any step, over KV that is read once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from nano_coder.models.local.decoding.attention import DecodeAttention, ReadAttention, Segment, Trunks
from nano_coder.models.local.decoding.kv_cache import (
    Arena,
    KVShape,
    Parked,
    PrefixCache,
    Trunk,
    common_prefix,
)
from nano_coder.models.local.decoding.llama import LlamaForward
from nano_coder.models.local.decoding.row import Row
from nano_coder.models.local.decoding.sampler import draw
from nano_coder.models.local.decoding.speculative import CONTEXT, Drafts

_READ_TOKENS = 2048
"""tokens of one reading pass, which bounds the memory of its activations"""
_SHARED_PREFIX = 32
"""positions from which copying KV of another prompt beats reading them"""
_JOIN_SHARE = 4
"""rows join when 1 / this of the slots is free: reading a few rows at a time costs many passes"""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Tokens since the decoder was made."""

    read: int = 0
    """prompt and observation tokens that went through the model"""
    reused: int = 0
    """prompt and observation tokens whose KV was there already"""
    decoded: int = 0
    """tokens drawn in steps"""
    drafted: int = 0
    """tokens fed on a guess"""
    held: int = 0
    """of which so many were what was drawn"""
    steps: int = 0


@dataclass(slots=True, eq=False)
class Seat:
    """A row in the batch, and the KV of it that is there."""

    row: Row
    trunk: Trunk
    length: int
    """positions in its slot, behind the trunk"""
    logits_V: Tensor | None = None
    """of its first token, where its trunk does not have them"""

    @property
    def read(self) -> int:
        """Positions of the row whose KV is there."""
        return len(self.trunk.ids) + self.length

    @property
    def capacity(self) -> int:
        """Positions that its slot may come to hold."""
        return len(self.row.request.ids) + self.row.limit - len(self.trunk.ids)


class ContinuousDecoder:
    """Decodes queued rows, `max_batch` at a time. Which rows are in a step depends on their tokens alone.

    Every row stands on a trunk, the KV of a prompt that its group shares, and owns a slot of the arena for
    what comes after.
    """

    def __init__(self, forward: LlamaForward, *, max_batch: int, max_bytes: int) -> None:
        """`max_bytes` bounds the slots of the rows being decoded, and once more what is kept for later."""
        self._forward = forward
        self._shape = KVShape(
            layers=len(forward.layers), keys=forward.keys, dim=forward.dim,
            dtype=forward.dtype, device=forward.device,
        )  # fmt: skip
        self._max_batch = max_batch
        self._max_bytes = max_bytes
        self._queue: deque[Row] = deque()
        self._seats: list[Seat] = []
        self._arena = Arena(self._shape)
        self._trunks: Trunks | None = None
        """those of the batch, as it was when it last changed"""
        self._changed = True
        self._drafts = Drafts()
        self.cache = PrefixCache(self._shape, max_bytes)
        self.counts = Counts()

    @property
    def decoding(self) -> list[Row]:
        """The rows in the batch, by slot."""
        return [seat.row for seat in self._seats]

    @property
    def busy(self) -> bool:
        return bool(self._seats or self._queue)

    def admit(self, rows: Sequence[Row]) -> None:
        self._queue.extend(rows)

    def step(self) -> list[Row]:
        """Let waiting rows join, then draw a token for each row, and more where a draft holds. The rows that
        finished."""
        joined = self._join()
        finished = self._draw(joined, [[]] * len(joined), _first_logits(joined)) if joined else []
        if self._seats:
            drafts = self._draft()
            finished += self._draw(list(self._seats), drafts, self._decode(drafts), fed=True)
        return finished

    def drop(self, rows: Sequence[Row]) -> None:
        """Stop decoding these; nobody waits for them."""
        self._queue = deque(row for row in self._queue if row not in rows)
        for seat in [seat for seat in self._seats if seat.row in rows]:
            self._leave(seat)

    def release(self, owner: int) -> None:
        """Forget the row that was kept for this owner."""
        self.cache.release(owner)

    def clear(self) -> None:
        """Forget every row and all KV, and give the memory back."""
        self._queue.clear()
        self._seats.clear()
        self._arena = Arena(self._shape)
        self._trunks, self._changed = None, True
        self._drafts = Drafts()
        self.cache.clear()

    def _join(self) -> list[Seat]:
        """Rows of the queue take free slots, and what they have not read yet is read."""
        rows = self._take()
        if not rows:
            return []
        new = self._prompts(Counter(row.request.ids for row, kept in rows if kept is None))
        first = len(self._seats)
        unread = {trunk.ids: trunk for trunk, _ in new}
        seats = [self._seat(row, kept, unread.get(row.request.ids)) for row, kept in rows]
        self._seats += seats
        self._arena.reserve(len(self._seats), max(seat.capacity for seat in self._seats), first)
        rest = []
        for slot, (seat, (_, kept)) in enumerate(zip(seats, rows, strict=True), start=first):
            if kept is not None:
                self._arena.load(slot, kept.kv)
            ids = seat.row.request.ids[seat.read :]
            if ids:
                rest.append((seat, Segment(ids, self._arena.slot(slot), seat.length, seat.trunk)))
        logits = iter(self._read([segment for _, segment in [*new, *rest]]))
        for trunk, segment in new:
            trunk.logits_V = next(logits)
            self.cache.add(trunk)
            self._drafts.note(segment.ids)
        for seat, segment in rest:
            seat.logits_V = next(logits)
            seat.length += len(segment.ids)
            self._drafts.note(segment.ids)
        self._changed = True
        self.cache.evict()
        return seats

    def _take(self) -> list[tuple[Row, Parked | None]]:
        """The rows that join now, in the order of the queue, with what is kept of each."""
        free = self._max_batch - len(self._seats)
        if not self._queue or (self._seats and free * _JOIN_SHARE < self._max_batch):
            return []
        alike = Counter(row.request.ids for row in self._queue)
        capacity = max((seat.capacity for seat in self._seats), default=0)
        rows: list[tuple[Row, Parked | None]] = []
        while self._queue and len(rows) < free:
            row = self._queue[0]
            ids = row.request.ids
            kept = self.cache.parked(row.request.owner, ids)
            trunk = len(kept.trunk.ids) if kept is not None else len(ids) * (alike[ids] > 1)
            capacity = max(capacity, len(ids) + row.limit - trunk)
            slots = len(self._seats) + len(rows) + 1
            if slots > 1 and slots * capacity * self._shape.token_bytes > self._max_bytes:
                break
            rows.append((self._queue.popleft(), kept))
        return rows

    def _prompts(self, fresh: Counter[tuple[int, ...]]) -> list[tuple[Trunk, Segment]]:
        """New trunks for these prompts, and what of each is still to be read.

        A prompt of several rows becomes a trunk; so does a prompt that begins like no other. Any other row
        stands on the trunk that it begins with, and reads the rest for itself.
        """
        self._read_stem([ids for ids in fresh if self.cache.trunk(ids) is None])
        new = []
        for ids, count in fresh.items():
            base = self.cache.base(ids)
            near, common = self.cache.nearest(ids)
            if base is not None:
                if base.ids == ids and base.logits_V is not None:
                    continue
                if count == 1 and common == len(base.ids) < len(ids):
                    continue
            # the last token is read in any case, for the logits after it
            start = min(common, len(ids) - 1) if common >= _SHARED_PREFIX else 0
            trunk = Trunk(ids, self._shape.zeros(self._shape.keys, len(ids)))
            if near is not None:
                trunk.kv[:, :, :, :start] = near.kv[:, :, :, :start]
            self.counts.reused += start
            new.append((trunk, Segment(ids[start:], trunk.kv, start)))
        return new

    def _read_stem(self, prompts: list[tuple[int, ...]]) -> None:
        """What several new prompts begin with is read once and kept."""
        if len(prompts) < 2:
            return
        common = min(len(ids) - 1 for ids in prompts)
        for ids in prompts[1:]:
            common = min(common, common_prefix(prompts[0], ids))
        if common < _SHARED_PREFIX or self.cache.nearest(prompts[0])[1] >= common:
            return
        stem = Trunk(prompts[0][:common], self._shape.zeros(self._shape.keys, common))
        self._read([Segment(stem.ids, stem.kv, 0)])
        self.cache.add(stem)

    def _seat(self, row: Row, kept: Parked | None, prompt: Trunk | None) -> Seat:
        """A seat on what is kept of the row, on the new trunk of its prompt, or on one it begins with."""
        owner, ids = row.request.owner, row.request.ids
        if owner is not None:
            self.cache.release(owner)
        trunk = kept.trunk if kept is not None else prompt or self.cache.base(ids)
        assert trunk is not None, "no prompt joins without a trunk"
        trunk.users += 1
        seat = Seat(row, trunk, kept.kv.shape[3] if kept is not None else 0)
        self.counts.reused += seat.read if prompt is None else 0
        return seat

    def _read(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Store the KV of all new tokens. [V] logits after the last token of each segment."""
        logits: list[Tensor] = []
        for batch in _passes(segments):
            positions = [p for s in batch for p in range(s.position, s.position + len(s.ids))]
            ends = [end - 1 for end in accumulate(len(segment.ids) for segment in batch)]
            hidden_NH = self._forward.hidden(
                self._tensor([token for segment in batch for token in segment.ids]),
                self._tensor(positions),
                ReadAttention(batch),
            )
            logits += self._forward.logits(hidden_NH[self._tensor(ends)])
            self.counts.read += len(positions)
        return logits

    def _draft(self) -> list[list[int]]:
        """What each row of the batch is likely to say next; nothing for most where many rows decode."""
        room = self._drafts.room(len(self._seats))
        drafts = []
        for seat in self._seats:
            row = seat.row
            # the token behind a draft is drawn as well
            longest = min(room, row.limit - len(row.ids) - 1)
            drafts.append(self._drafts.guess(row.last(CONTEXT), longest) if longest > 0 else [])
            room -= len(drafts[-1])
        return drafts

    def _decode(self, drafts: Sequence[list[int]]) -> Tensor:
        """Feed the last token of each row, and its draft. [N, V] logits of what comes after each."""
        forward, seats = self._forward, self._seats
        counts = [1 + len(draft) for draft in drafts]
        if self._changed:
            self._trunks = Trunks([seat.trunk for seat in seats], forward.heads, forward.keys, self._trunks)
            self._changed = False
        assert self._trunks is not None
        trunks = self._trunks
        if any(drafts):
            each = [seat.trunk for seat, count in zip(seats, counts, strict=True) for _ in range(count)]
            trunks = Trunks(each, forward.heads, forward.keys, trunks)
        rows = self.decoding
        lengths = [seat.length for seat in seats]
        hidden_NH = forward.hidden(
            self._tensor(
                [token for row, draft in zip(rows, drafts, strict=True) for token in (row.ids[-1], *draft)]
            ),
            self._tensor(
                [row.position + nth for row, count in zip(rows, counts, strict=True) for nth in range(count)]
            ),
            DecodeAttention(self._arena, lengths, counts, trunks, forward.heads),
        )
        self.counts.steps += 1
        return forward.logits(hidden_NH)

    def _draw(
        self, seats: Sequence[Seat], drafts: Sequence[list[int]], logits_NV: Tensor, *, fed: bool = False
    ) -> list[Row]:
        """A token for each of these rows, and one more for each drafted token that is what was drawn. Rows
        that end with it leave the batch. `fed`: the tokens before the logits are in the slots now."""
        places = [
            (seat.row, nth)
            for seat, draft in zip(seats, drafts, strict=True)
            for nth in range(len(draft) + 1)
        ]
        drawn = draw(
            logits_NV,
            [row.request.sampling for row, _ in places],
            [row.uniforms[len(row.ids) + nth] for row, nth in places],
        )
        tokens = iter(zip(*drawn, strict=True))
        held = 0
        for seat, draft in zip(seats, drafts, strict=True):
            kept = self._keep(seat.row, draft, list(islice(tokens, len(draft) + 1)))
            held += kept - 1
            if fed:
                seat.length += kept
                self.counts.decoded += kept
        drafted = len(places) - len(seats)
        self.counts.drafted += drafted
        self.counts.held += held
        self._drafts.told(drafted, held)
        ended = [seat for seat in seats if seat.row.finish is not None]
        for seat in ended:
            self._leave(seat)
        return [seat.row for seat in ended]

    def _keep(self, row: Row, draft: Sequence[int], drawn: Sequence[tuple[int, float]]) -> int:
        """Take drawn tokens up to the first that is not what was drafted. How many were taken."""
        kept = 0
        for token, logprob in drawn:
            row.take(token, logprob)
            self._drafts.note(row.last(CONTEXT + 1))
            kept += 1
            if row.finish is not None or list(draft[kept - 1 : kept]) != [token]:
                break
        return kept

    def _leave(self, seat: Seat) -> None:
        """Free the slot, which the last row of the batch takes; keep the KV if a next turn may come."""
        slot = self._seats.index(seat)
        row, owner = seat.row, seat.row.request.owner
        if row.finish is not None and owner is not None:
            ids = (*row.request.ids, *row.ids)[: seat.read]
            self.cache.park(owner, Parked(ids, seat.trunk, self._arena.copy(slot, seat.length)))
        seat.trunk.users -= 1
        last = self._seats.pop()
        if last is not seat:
            self._arena.move(len(self._seats), slot, last.length)
            self._seats[slot] = last
        self._changed = True

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._shape.device)


def _first_logits(seats: Sequence[Seat]) -> Tensor:
    """[B, V] of rows that joined just now."""
    logits = []
    for seat in seats:
        found = seat.logits_V if seat.logits_V is not None else seat.trunk.logits_V
        assert found is not None, "a row joins with the logits of its first token"
        logits.append(found)
        seat.logits_V = None
    return torch.stack(logits)


def _passes(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Consecutive segments, some thousand tokens at a time; a longer one is a pass of its own."""
    batch: list[Segment] = []
    for segment in segments:
        if batch and sum(len(s.ids) for s in batch) + len(segment.ids) > _READ_TOKENS:
            yield batch
            batch = []
        batch.append(segment)
    if batch:
        yield batch
