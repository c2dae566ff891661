"""Continuous batching: rows join and leave the batch at any step; shared prompts are prefilled once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from nano_coder.models.local.attention import (
    Arena,
    DecodeAttention,
    KVShape,
    PrefillAttention,
    PrefillSegment,
    Prefix,
    PrefixCache,
    RetainedRow,
    ReusedRow,
    SharedPrefixes,
    common_prefix,
)
from nano_coder.models.local.decode_graph import DecodeGraph
from nano_coder.models.local.llama import Attend, LlamaForward
from nano_coder.models.local.sampler import DecodingRow, draw_rows, refuse_unwanted
from nano_shared.policy import Likeliest

_PREFILL_TOKENS = 2048
"""tokens of one prefill pass; bounds the memory of its activations"""
_SHARED_PREFIX = 32
"""shortest common prefix whose KV is copied from another prompt instead of being prefilled"""
_JOIN_SHARE = 4
"""queued rows join when 1 / this of the slots is free: prefilling few rows at a time costs many passes"""
CONTEXT = 3
"""length of the n-gram that predicts the next token"""
_LONGEST_DRAFT = 4
"""most draft tokens of one row"""
_STEP_TOKENS = 48
"""tokens a step, over all rows, below which one more is nearly free: loading the weights dominates"""
_MIN_ACCEPTANCE = 0.25
"""acceptance rate below which proposing stops"""
_HALF_LIFE = 64
"""draft tokens after which earlier acceptances count half in the acceptance rate"""
_RETRY_STEPS = 8
"""steps after which proposing is tried again while the acceptance rate is too low"""
_MAX_NGRAMS = 1 << 17
"""size of the n-gram table, some 20 MB; beyond it the table is cleared"""


@dataclass(slots=True, kw_only=True)
class TokenCounts:
    """Token counts since the decoder was created."""

    prompt: int = 0
    """tokens of the requests whose rows joined, cached or not"""
    prefilled: int = 0
    """prompt and observation tokens that were prefilled"""
    decoded: int = 0
    """tokens sampled in decoding steps"""
    num_draft_tokens: int = 0
    """draft tokens that were fed"""
    num_accepted_tokens: int = 0
    """draft tokens that equal the sampled ones"""
    steps: int = 0
    """decoding steps"""


@dataclass(slots=True, eq=False)
class BatchSlot:
    """A row of the batch with its shared prefix; the rest of its KV is in the arena."""

    row: DecodingRow
    prefix: Prefix
    length: int
    """positions in the arena, after the prefix"""
    logits_V: Tensor | None = None
    """for its first token, if its prefix does not have them"""

    @property
    def num_cached(self) -> int:
        """Positions of the row whose KV is in the cache."""
        return len(self.prefix.ids) + self.length

    @property
    def capacity(self) -> int:
        """Most positions that its slot of the arena may need."""
        return self.num_tokens - len(self.prefix.ids)

    @property
    def num_tokens(self) -> int:
        """Most tokens that the row may have."""
        return len(self.row.request.ids) + self.row.limit


@dataclass(frozen=True, slots=True, eq=False)
class _NewPrefix:
    """A prefix to be prefilled, all but the tokens that another one has."""

    prefix: Prefix
    near: Prefix | None = None
    start: int = 0
    """leading tokens whose KV is copied from `near`"""


@dataclass(frozen=True, slots=True, eq=False)
class _Joining:
    """Rows that may join together, and the prefixes that they need."""

    rows: Sequence[tuple[DecodingRow, ReusedRow | None]]
    slots: list[BatchSlot]
    """without their KV, in the order of `rows`"""
    common: Prefix | None
    """prefilled first: a beginning of several of the new ones"""
    new: dict[tuple[int, ...], _NewPrefix]

    @property
    def added(self) -> list[Prefix]:
        return [*([self.common] if self.common else []), *(one.prefix for one in self.new.values())]

    @property
    def read(self) -> set[Prefix | RetainedRow]:
        """What has to stay in the cache until they have joined."""
        kept = [reused.row for _, reused in self.rows if reused is not None]
        near = [one.near for one in self.new.values() if one.near is not None]
        return {*(slot.prefix for slot in self.slots), *self.added, *kept, *near}


class ContinuousDecoder:
    """Decodes queued rows, at most `max_batch` at a time. The composition of a step depends on tokens only.

    Every row has a prefix, the KV of a prompt that it may share with its group, and a slot of the arena for
    the tokens after that.
    """

    def __init__(self, forward: LlamaForward, *, max_batch: int, max_bytes: int) -> None:
        """`max_bytes` bounds all KV: the rows being decoded and what is copied as their blocks grow, prefixes
        with the block that a step reads them from, and retained rows. Rows wait, and what is retained goes.
        The keys and values of one layer that a prefill reads are not in it. A single row that does not fit
        is the caller's to refuse (`Engine`)."""
        self._forward = forward
        self._shape = KVShape(
            layers=len(forward.layers), keys=forward.keys, dim=forward.dim,
            dtype=forward.dtype, device=forward.device,
        )  # fmt: skip
        self._max_batch = max_batch
        self._max_bytes = max_bytes
        self._queue: deque[DecodingRow] = deque()
        self._slots: list[BatchSlot] = []
        self._arena = Arena(self._shape)
        self._prefixes: SharedPrefixes | None = None
        """those of the batch after its last change"""
        self._changed = True
        self._waits: tuple[int, int] | None = None
        """numbers of slots and queued rows when there was no room for the next row"""
        self._speculator = NGramSpeculator()
        self._graph = DecodeGraph(forward) if can_record(forward) else None
        self.cache = PrefixCache(self._shape, max_bytes)
        self.counts = TokenCounts()

    @property
    def decoding(self) -> list[DecodingRow]:
        return [slot.row for slot in self._slots]

    @property
    def rows(self) -> list[DecodingRow]:
        """Those that are decoded, and those that wait."""
        return [*self.decoding, *self._queue]

    @property
    def kv_usage(self) -> float:
        """Share of the KV budget in use, of rows being decoded and of retained ones."""
        decoding = sum(slot.length for slot in self._slots) * self._shape.token_bytes
        return min(1.0, (decoding + self.cache.bytes) / self._max_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV now: the arena, the block of prefixes, and the cache."""
        return self._block_bytes + self.cache.bytes

    @property
    def _block_bytes(self) -> int:
        return self._arena.kv.nbytes + (self._prefixes.copied if self._prefixes else 0)

    @property
    def busy(self) -> bool:
        return bool(self._slots or self._queue)

    def add_rows(self, rows: Sequence[DecodingRow]) -> None:
        self._queue.extend(rows)

    def step(self) -> list[DecodingRow]:
        """Let queued rows join, then sample a token for each row, and one more for each accepted draft token.

        Returns the rows that finished. Raises Unwanted, and is of no use then, if all were stopped.
        """
        joined = self._join()
        finished = self._draw(joined, [[]] * len(joined), _first_logits(joined)) if joined else []
        if self._slots:
            draft_tokens = self._propose()
            finished += self._draw(list(self._slots), draft_tokens, self._decode(draft_tokens), fed=True)
        return finished

    def drop(self, rows: Sequence[DecodingRow]) -> None:
        self._queue = deque(row for row in self._queue if row not in rows)
        for slot in [slot for slot in self._slots if slot.row in rows]:
            self._leave(slot)

    def release(self, owner: int) -> None:
        self.cache.release(owner)

    def logits_of(self, ids: tuple[int, ...], first: int) -> Tensor:
        """[L - first, V] logits that predict `ids[first:]`, as decoding computes them; keeps no KV."""
        read = ids[:-1]
        segment = PrefillSegment(read, self._shape.zeros(self._shape.keys, len(read)), 0)
        hidden_NH = self._forward.hidden(
            self._tensor(list(read)), self._tensor(list(range(len(read)))), PrefillAttention([segment])
        )
        return self._forward.logits(hidden_NH[first - 1 :])

    def _join(self) -> list[BatchSlot]:
        """Move queued rows into free slots, and prefill their tokens that are not yet in the KV cache."""
        joining = self._select_rows()
        if joining is None:
            return []
        rows, slots, first = joining.rows, joining.slots, len(self._slots)
        self.counts.prompt += sum(len(row.request.ids) for row, _ in rows)
        for slot in slots:
            slot.prefix.users += 1
        self._slots += slots
        self._reserve(first)
        new = self._allocate(joining)
        rest = []
        for index, (slot, (_, kept)) in enumerate(zip(slots, rows, strict=True), start=first):
            if kept is not None:
                self._arena.slot(index)[:, :, :, : kept.length] = kept.row.kv[:, :, :, : kept.length]
                if kept.length == kept.row.kv.shape[3]:  # it is retained again, with what follows
                    self.cache.drop(kept.row)
            ids = slot.row.request.ids[slot.num_cached :]
            if ids:
                rest.append((slot, PrefillSegment(ids, self._arena.slot(index), slot.length, slot.prefix)))
        logits = iter(self._prefill([segment for _, segment in [*new, *rest]]))
        for prefix, segment in new:
            prefix.logits_V = next(logits)
            self.cache.add(prefix)
            self._speculator.observe(segment.ids)
        for slot, segment in rest:
            slot.logits_V = next(logits)
            slot.length += len(segment.ids)
            self._speculator.observe(segment.ids)
        self._changed = True
        return slots

    def _select_rows(self) -> _Joining | None:
        """The rows that join now, the first of the queue, each with its retained KV if there is any; there is
        room for them when it returns."""
        free = self._max_batch - len(self._slots)
        waits = len(self._slots), len(self._queue)
        if not self._queue or waits == self._waits or (self._slots and free * _JOIN_SHARE < self._max_batch):
            return None
        rows = [
            (row, self.cache.retained(row.request.owner, row.request.ids))
            for row in islice(self._queue, free)
        ]
        joining = self._largest(rows)
        if joining is None and not self._slots:
            self._free_blocks()
            self._forget_graph()
            # alone, it joins without what another prompt or its own last turn left
            joining = self._largest(rows) or self._plan([(self._queue[0], None)], alone=True)
        if joining is None:
            self._waits = waits
            return None
        if not self.cache.evict(*self._demand(joining)):
            raise MemoryError(f"a row of {joining.slots[0].num_tokens} tokens does not fit in kv_gib")
        for _ in joining.rows:
            self._queue.popleft()
        return joining

    def _largest(self, rows: Sequence[tuple[DecodingRow, ReusedRow | None]]) -> _Joining | None:
        """As many of these rows, from the first, as there is room for."""
        if self._has_room(whole := self._plan(rows)):
            return whole
        sizes = range(1, len(rows))
        size = bisect_left(sizes, True, key=lambda size: not self._has_room(self._plan(rows[:size])))
        return self._plan(rows[:size]) if size else None

    def _has_room(self, joining: _Joining) -> bool:
        """Whether they may join. Several rows take half of the memory at most, so that what is retained is
        not lost to them at once."""
        slots = [*self._slots, *joining.slots]
        tokens = len(slots) * max(slot.capacity for slot in slots)
        if len(slots) > 1 and 2 * tokens * self._shape.token_bytes > self._max_bytes:
            return False
        others, keep = self._demand(joining)
        return self.cache.least(keep) + others <= self._max_bytes

    def _demand(self, joining: _Joining) -> tuple[int, set[Prefix | RetainedRow]]:
        """Bytes beside the cache while and after they join, and what the cache has to hold meanwhile."""
        slots, arena = [*self._slots, *joining.slots], self._arena
        shape = arena.grown(len(slots), max(slot.capacity for slot in slots))
        after, now = math.prod(shape) * self._shape.token_bytes, arena.kv.nbytes
        others = after + (now if after > now and self._slots else 0)
        prefixes = {slot.prefix for slot in slots}
        keep = {*joining.read, *prefixes}
        if self._prefixes is not None and self._prefixes.covers(prefixes):
            return others + self._prefixes.copied, {*keep, *self._prefixes.distinct}
        if len(prefixes) > 1:
            longest = max(len(prefix.ids) for prefix in prefixes)
            others += len(prefixes) * longest * self._shape.token_bytes
        return others, keep

    def _plan(self, rows: Sequence[tuple[DecodingRow, ReusedRow | None]], *, alone: bool = False) -> _Joining:
        """The prefix of each row: that of its retained KV, its whole prompt, or the longest cached one.

        A prompt of several rows becomes a prefix, and so does one without a cached prefix. Any other row uses
        the longest cached prefix, and prefills the rest in its own slot. `alone`: nothing is copied.
        """
        fresh = Counter(row.request.ids for row, kept in rows if kept is None)
        common = self._common_prefix([ids for ids in fresh if self.cache.get(ids) is None])
        more = [common] if common is not None else []
        new = {}
        for ids, count in fresh.items():
            base = self.cache.longest_prefix(ids, more)
            near, shared = self.cache.closest_prefix(ids, more)
            if base is not None:
                if base.ids == ids and base.logits_V is not None:
                    continue
                if count == 1 and shared == len(base.ids) < len(ids):
                    continue
            prefix = Prefix(ids, self._shape.zeros(self._shape.keys, 0))
            # the last token is always prefilled, for the logits after it
            copied = shared >= _SHARED_PREFIX and not alone
            new[ids] = _NewPrefix(prefix, near, min(shared, len(ids) - 1)) if copied else _NewPrefix(prefix)
        slots = []
        for row, kept in rows:
            ids = row.request.ids
            if kept is not None:
                slots.append(BatchSlot(row, kept.row.prefix, kept.length))
                continue
            found = new[ids].prefix if ids in new else self.cache.longest_prefix(ids, more)
            assert found is not None, "every row that joins has a prefix"
            slots.append(BatchSlot(row, found, 0))
        return _Joining(rows, slots, common, new)

    def _common_prefix(self, prompts: list[tuple[int, ...]]) -> Prefix | None:
        """The common beginning of several new prompts, if it is to be prefilled once and cached."""
        if len(prompts) < 2:
            return None
        common = min(len(ids) - 1 for ids in prompts)
        for ids in prompts[1:]:
            common = min(common, common_prefix(prompts[0], ids))
        if common < _SHARED_PREFIX or self.cache.closest_prefix(prompts[0])[1] >= common:
            return None
        return Prefix(prompts[0][:common], self._shape.zeros(self._shape.keys, 0))

    def _allocate(self, joining: _Joining) -> list[tuple[Prefix, PrefillSegment]]:
        """Memory for the new prefixes; each with the segment that has to be prefilled."""
        for prefix in joining.added:
            prefix.kv = self._shape.zeros(self._shape.keys, len(prefix.ids))
        if joining.common is not None:
            self._prefill([PrefillSegment(joining.common.ids, joining.common.kv, 0)])
            self.cache.add(joining.common)
        for one in joining.new.values():
            if one.near is not None:
                one.prefix.kv[:, :, :, : one.start] = one.near.kv[:, :, :, : one.start]
        return [
            (one.prefix, PrefillSegment(one.prefix.ids[one.start :], one.prefix.kv, one.start))
            for one in joining.new.values()
        ]

    def _reserve(self, first: int) -> None:
        """Room in the arena for all slots, of which the first have contents; blocks that are no longer used
        go first."""
        self._drop_block()
        capacity = max(slot.capacity for slot in self._slots)
        if self._arena.grown(len(self._slots), capacity) != tuple(self._arena.kv.shape[2:5:2]):
            self._forget_graph()
        self._arena.reserve(len(self._slots), capacity, first)

    def _drop_block(self) -> None:
        """Let go of a block of prefixes that does not serve the rows of the batch."""
        wanted = {slot.prefix for slot in self._slots}
        if self._prefixes is not None and not self._prefixes.covers(wanted):
            self._prefixes = None
            self._forget_graph()

    def _free_blocks(self) -> None:
        self._arena, self._prefixes = Arena(self._shape), None

    def _forget_graph(self) -> None:
        if self._graph is not None:
            self._graph.forget()

    def _prefill(self, segments: Sequence[PrefillSegment]) -> list[Tensor]:
        """Store the KV of all segments. Returns, for each, the [V] logits after its last token."""
        logits: list[Tensor] = []
        for batch in _prefill_passes(segments):
            positions = [p for s in batch for p in range(s.position, s.position + len(s.ids))]
            ends = [end - 1 for end in accumulate(len(segment.ids) for segment in batch)]
            hidden_NH = self._forward.hidden(
                self._tensor([token for segment in batch for token in segment.ids]),
                self._tensor(positions),
                self._while_wanted(PrefillAttention(batch)),
            )
            logits += self._forward.logits(hidden_NH[self._tensor(ends)])
            self.counts.prefilled += len(positions)
        return logits

    def _while_wanted(self, attend: PrefillAttention) -> Attend:
        """The attention of a prefill that ends before a layer if every row was stopped: a pass of a large
        model takes half a minute."""

        def checked(*of_layer: Any) -> Tensor:
            refuse_unwanted(self.rows)
            return attend(*of_layer)

        return checked

    def _propose(self) -> list[list[int]]:
        """Draft tokens for each row of the batch; few or none where many rows are decoded, none where a
        step is recorded, which is faster."""
        if self._graph is not None:
            return [[]] * len(self._slots)
        room = self._speculator.budget(len(self._slots))
        draft_tokens = []
        for slot in self._slots:
            row = slot.row
            # one token is sampled after the draft as well; a grammar knows what is allowed after sampled ones
            longest = 0 if row.request.is_shaped else min(room, row.limit - len(row.ids) - 1)
            draft_tokens.append(self._speculator.propose(row.last(CONTEXT), longest) if longest > 0 else [])
            room -= len(draft_tokens[-1])
        return draft_tokens

    def _decode(self, draft_tokens: Sequence[list[int]]) -> Tensor:
        """Feed the last token of each row and its draft tokens. Returns [N, V] logits after each of them."""
        forward, slots = self._forward, self._slots
        counts = [1 + len(draft_ids) for draft_ids in draft_tokens]
        if self._changed:
            self._drop_block()
            self._prefixes = SharedPrefixes(
                [slot.prefix for slot in slots], forward.heads, forward.keys, self._prefixes
            )
            self._changed = False
        assert self._prefixes is not None
        prefixes = self._prefixes
        if any(draft_tokens):
            each = [slot.prefix for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
            prefixes = SharedPrefixes(each, forward.heads, forward.keys, prefixes)
        rows = self.decoding
        lengths = [slot.length for slot in slots]
        if self._graph is not None:
            logits_BV = self._graph.step(
                self._arena, prefixes, lengths, [row.ids[-1] for row in rows], [row.position for row in rows]
            )
            if logits_BV is not None:
                self.counts.steps += 1
                return logits_BV
        positions_N = self._tensor(
            [row.position + nth for row, count in zip(rows, counts, strict=True) for nth in range(count)]
        )
        hidden_NH = forward.hidden(
            self._tensor(
                [
                    token
                    for row, draft_ids in zip(rows, draft_tokens, strict=True)
                    for token in (row.ids[-1], *draft_ids)
                ]
            ),
            positions_N,
            DecodeAttention(
                self._arena, lengths, counts, prefixes, forward.heads, positions_N, forward.windows
            ),
        )
        self.counts.steps += 1
        return forward.logits(hidden_NH)

    def _draw(
        self,
        slots: Sequence[BatchSlot],
        draft_tokens: Sequence[list[int]],
        logits_NV: Tensor,
        *,
        fed: bool = False,
    ) -> list[DecodingRow]:
        """Sample a token for each row, and one more for each accepted draft token. Returns the finished rows.

        Finished rows leave the batch. `fed`: the tokens before the logits were written to the slots by a
        decoding step, not by prefill.
        """
        places = [
            (slot.row, nth)
            for slot, draft_ids in zip(slots, draft_tokens, strict=True)
            for nth in range(len(draft_ids) + 1)
        ]
        tokens = draw_rows(places, logits_NV)
        num_accepted_tokens = 0
        for slot, draft_ids in zip(slots, draft_tokens, strict=True):
            accepted = self._accept(slot.row, draft_ids, list(islice(tokens, len(draft_ids) + 1)))
            num_accepted_tokens += accepted - 1
            if fed:
                slot.length += accepted
                self.counts.decoded += accepted
        num_draft_tokens = len(places) - len(slots)
        self.counts.num_draft_tokens += num_draft_tokens
        self.counts.num_accepted_tokens += num_accepted_tokens
        self._speculator.record(num_draft_tokens, num_accepted_tokens)
        ended = [slot for slot in slots if slot.row.finish is not None]
        for slot in ended:
            self._leave(slot)
        return [slot.row for slot in ended]

    def _accept(
        self, row: DecodingRow, draft_ids: Sequence[int], drawn: Sequence[tuple[int, float, Likeliest]]
    ) -> int:
        """Append sampled tokens up to the first that differs from its draft token. Returns how many."""
        accepted = 0
        for token, logprob, likeliest in drawn:
            row.take(token, logprob, likeliest)
            self._speculator.observe(row.last(CONTEXT + 1))
            accepted += 1
            if row.finish is not None or list(draft_ids[accepted - 1 : accepted]) != [token]:
                break
        return accepted

    def _leave(self, slot: BatchSlot) -> None:
        """Free the slot and move the last row into it; retain the KV if its owner may ask for a next turn."""
        index = self._slots.index(slot)
        row, owner = slot.row, slot.row.request.owner
        if row.finish is not None and owner is not None:
            held = {one.prefix for one in self._slots} | set(
                self._prefixes.distinct if self._prefixes else ()
            )
            if self.cache.evict(self._block_bytes + slot.length * self._shape.token_bytes, held):
                ids = (*row.request.ids, *row.ids)[: slot.num_cached]
                kv = self._arena.slot(index)[:, :, :, : slot.length].clone()
                self.cache.retain(owner, RetainedRow(ids, slot.prefix, kv))
        slot.prefix.users -= 1
        self._waits = None
        last = self._slots.pop()
        if last is not slot:
            moved = self._arena.slot(len(self._slots))[:, :, :, : last.length]
            self._arena.slot(index)[:, :, :, : last.length] = moved
            self._slots[index] = last
        self._changed = True
        if not self._slots and self._graph is None:  # a graph is recorded with its blocks
            self._free_blocks()

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._shape.device)


def can_record(forward: LlamaForward) -> bool:
    """Whether steps of this model are recorded: on CUDA, where all that is computed has fixed shapes."""
    return forward.device.type == "cuda" and forward.fixed_shapes


def _first_logits(slots: Sequence[BatchSlot]) -> Tensor:
    """[B, V] logits for the first token of rows that just joined."""
    logits = []
    for slot in slots:
        found = slot.logits_V if slot.logits_V is not None else slot.prefix.logits_V
        assert found is not None, "a row that joins has the logits of its first token"
        logits.append(found)
        slot.logits_V = None
    return torch.stack(logits)


def _prefill_passes(segments: Sequence[PrefillSegment]) -> Iterator[list[PrefillSegment]]:
    """Consecutive segments in passes of at most `_PREFILL_TOKENS`; a longer segment is a pass of its own."""
    batch: list[PrefillSegment] = []
    for segment in segments:
        if batch and sum(len(s.ids) for s in batch) + len(segment.ids) > _PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(segment)
    if batch:
        yield batch


class NGramSpeculator:
    """Proposes draft tokens from a table of the n-grams of all rows of one version of the weights.

    A decoding step feeds a row's last token and its draft tokens, and samples a token after each of them.
    Draft tokens are accepted up to the first that differs from the sampled one. Every token is sampled with a
    random number of its own, so neither tokens nor log-probs depend on the draft. This is the method of
    Leviathan et al. (arXiv 2211.17192) with an n-gram table as the draft model and exact-match acceptance.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._num_draft_tokens = 0.0
        self._num_accepted_tokens = 0.0
        self._steps = 0

    def observe(self, ids: Sequence[int]) -> None:
        if len(self._next) > _MAX_NGRAMS:
            self._next.clear()
        for at in range(CONTEXT, len(ids)):
            self._next[tuple(ids[at - CONTEXT : at])] = ids[at]

    def budget(self, rows: int) -> int:
        """Draft tokens that this step may propose for `rows` rows together."""
        self._steps += 1
        enabled = (
            self._num_accepted_tokens >= _MIN_ACCEPTANCE * self._num_draft_tokens
            or self._steps % _RETRY_STEPS == 0
        )
        return max(0, _STEP_TOKENS - rows) if enabled else 0

    def propose(self, tail: Sequence[int], longest: int) -> list[int]:
        """At most `longest` tokens that are likely to come after `tail`."""
        known = list(tail[-CONTEXT:])
        draft: list[int] = []
        while len(draft) < min(longest, _LONGEST_DRAFT):
            token = self._next.get(tuple(known))
            if token is None:
                break
            draft.append(token)
            known = [*known[1:], token]
        return draft

    def record(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        fade = 0.5 ** (num_draft_tokens / _HALF_LIFE)
        self._num_draft_tokens = self._num_draft_tokens * fade + num_draft_tokens
        self._num_accepted_tokens = self._num_accepted_tokens * fade + num_accepted_tokens
