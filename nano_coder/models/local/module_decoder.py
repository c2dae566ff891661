"""Decoding by the model's own forward pass, for models without one of ours: one row after another.

Every row has a cache of transformers, of any kind, which is kept for the next turn of its owner. A row's
tokens do not depend on the others, and a step takes as long as the steps of its rows together.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nano_coder.models.local.engine import evaluating
from nano_coder.models.local.sampler import DecodingRow, draw_rows
from nano_shared.errors import UsageError


@dataclass(slots=True, eq=False)
class _Slot:
    row: DecodingRow
    cache: Any
    logits_V: Tensor


class ModuleDecoder:
    """Decodes queued rows, `max_batch` at a time."""

    def __init__(self, model: nn.Module, *, max_batch: int, max_tokens: int) -> None:
        """`max_tokens` bounds the tokens of the rows being decoded and of those retained together, but that
        one row is always decoded."""
        self._model: Any = model
        self._max_batch, self._max_tokens = max_batch, max_tokens
        self._queue: deque[DecodingRow] = deque()
        self._slots: list[_Slot] = []
        self._retained: dict[int, tuple[tuple[int, ...], Any]] = {}
        """by owner: the tokens in a cache, and the cache"""
        self.num_prefilled = 0
        """tokens that were fed beside those that were sampled"""

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._slots)

    @property
    def decoding(self) -> list[DecodingRow]:
        return [slot.row for slot in self._slots]

    def admit(self, rows: Sequence[DecodingRow]) -> None:
        self._queue.extend(rows)

    def step(self) -> list[DecodingRow]:
        """Let queued rows join, then sample a token for each row. Returns the rows that finished."""
        with evaluating(self._model):
            joined: list[_Slot] = []
            while self._queue and len(self._slots) < self._max_batch and self._make_room():
                joined.append(self._prefill(self._queue.popleft(), joined))
                self._slots.append(joined[-1])
            finished = self._draw(joined)
            for slot in self._slots:
                slot.logits_V = self._feed(slot.row.ids[-1:], slot.row.position, slot.cache).logits[0, -1]
            return finished + self._draw(list(self._slots))

    def drop(self, rows: Sequence[DecodingRow]) -> None:
        """Stop decoding these rows."""
        self._queue = deque(row for row in self._queue if row not in rows)
        self._slots = [slot for slot in self._slots if slot.row not in rows]

    def release(self, owner: int) -> None:
        """Forget the row retained for this owner."""
        self._retained.pop(owner, None)

    def _make_room(self) -> bool:
        """Whether the next queued row may join; the rows retained longest are forgotten for it."""
        needed = sum(len(row.request.ids) + row.limit for row in [*self.decoding, self._queue[0]])
        most = self._max_tokens - needed
        while self._retained and sum(len(ids) for ids, _ in self._retained.values()) > most:
            del self._retained[next(iter(self._retained))]
        return most >= 0 or not self._slots

    def _prefill(self, row: DecodingRow, joined: Sequence[_Slot]) -> _Slot:
        """Feed what the row's cache lacks; rows of one prompt share it."""
        ids = row.request.ids
        nothing: tuple[tuple[int, ...], Any] = (), None
        owner = row.request.owner
        kept, cache = nothing if owner is None else self._retained.pop(owner, nothing)
        if len(kept) >= len(ids) or ids[: len(kept)] != kept:
            kept, cache = nothing
        if not kept and (same := next((slot for slot in joined if slot.row.request.ids == ids), None)):
            return _Slot(row, copy.deepcopy(same.cache), same.logits_V)
        try:
            out = self._feed(ids[len(kept) :], len(kept), cache)
            found = _Slot(row, out.past_key_values, out.logits[0, -1])
        except (AttributeError, TypeError, ValueError) as problem:
            raise UsageError(
                f"{type(self._model).__name__} cannot be sampled from here, since it takes no cache of keys"
                f" and values ({problem}); serve it with another engine and name it openai:NAME with"
                " --base-url"
            ) from None
        self.num_prefilled += len(ids) - len(kept)
        return found

    def _feed(self, ids: Sequence[int], start: int, cache: Any) -> Any:
        """The module's output for the tokens of one row from `start` on; the cache grows by them."""
        device = next(iter(self._model.parameters())).device
        return self._model(
            input_ids=torch.tensor([[*ids]], device=device),
            position_ids=torch.arange(start, start + len(ids), device=device)[None],
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip

    def _draw(self, slots: Sequence[_Slot]) -> list[DecodingRow]:
        """Sample one token for each row. Returns the rows that finished with it, whose caches are kept for
        their owners."""
        if not slots:
            return []
        drawn = draw_rows([(slot.row, 0) for slot in slots], torch.stack([slot.logits_V for slot in slots]))
        for slot, (token, logprob, likeliest) in zip(slots, drawn, strict=True):
            slot.row.take(token, logprob, likeliest)
        ended = [slot for slot in slots if slot.row.finish is not None]
        self._slots = [slot for slot in self._slots if slot not in ended]
        for slot in ended:
            if slot.row.request.owner is not None:
                ids = (*slot.row.request.ids, *slot.row.ids)[:-1]
                self._retained[slot.row.request.owner] = ids, slot.cache
        return [slot.row for slot in ended]
