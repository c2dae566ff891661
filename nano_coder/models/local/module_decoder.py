"""Decoding by the model's own forward pass, for models without one of ours: one row after another.

Every row has a cache of transformers of its own, of any kind, which is kept for the next turn of its owner.
Rows join and leave at any step. A row's tokens do not depend on the others, and a step takes as long as the
steps of its rows together.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nano_coder.models.local.sampler import DecodingRow, draw, likeliest_tokens, shaped_logits
from nano_shared.errors import UsageError


@dataclass(slots=True, eq=False)
class _Slot:
    row: DecodingRow
    cache: Any
    logits_V: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Retained:
    ids: tuple[int, ...]
    """tokens in the cache"""
    cache: Any


class ModuleDecoder:
    """Decodes queued rows, `max_batch` at a time."""

    def __init__(self, model: nn.Module, *, max_batch: int, max_bytes: int) -> None:
        """`max_bytes` bounds the caches of the rows being decoded and those retained together, but that one
        row is always decoded. One layer's keys and values may stand in it twice, as they grow."""
        self._model: Any = model
        self._max_batch = max_batch
        self._max_bytes = max_bytes
        self._queue: deque[DecodingRow] = deque()
        self._slots: list[_Slot] = []
        self._retained: dict[int, _Retained] = {}
        self._token_bytes = 0.0
        """largest size of a cache by its tokens that was seen"""
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
            finished = self._draw(self._join())
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

    @property
    def cache_bytes(self) -> int:
        """Size of the retained caches."""
        return sum(_size(kept.cache) for kept in self._retained.values())

    def _row_bytes(self, rows: Sequence[DecodingRow]) -> float:
        """Most bytes of the caches of these rows, each as it grows."""
        return sum(len(row.request.ids) + row.limit for row in rows) * self._token_bytes

    def _evict(self, others: float) -> None:
        """Forget the rows retained longest until the rest and `others` bytes keep the budget."""
        while self._retained and self.cache_bytes + others > self._max_bytes:
            del self._retained[next(iter(self._retained))]

    def _join(self) -> list[_Slot]:
        """Move queued rows to those being decoded and prefill what their caches lack. Rows of one prompt
        share the prefill."""
        joined: list[_Slot] = []
        while self._queue and len(self._slots) < self._max_batch:
            needed = self._row_bytes([*self.decoding, self._queue[0]])
            if self._slots and needed > self._max_bytes:
                break
            self._evict(needed)
            joined.append(self._prefill(self._queue.popleft(), joined))
            self._slots.append(joined[-1])
        return joined

    def _prefill(self, row: DecodingRow, joined: Sequence[_Slot]) -> _Slot:
        ids = row.request.ids
        kept = self._retained.pop(row.request.owner, None) if row.request.owner is not None else None
        if kept is None or len(kept.ids) >= len(ids) or ids[: len(kept.ids)] != kept.ids:
            for other in joined:
                if other.row.request.ids == ids:
                    return _Slot(row, copy.deepcopy(other.cache), other.logits_V)
            kept = _Retained((), None)
        start = len(kept.ids)
        try:
            out = self._feed(ids[start:], start, kept.cache)
            cache = out.past_key_values
        except (AttributeError, TypeError, ValueError) as problem:
            raise UsageError(
                f"{type(self._model).__name__} cannot be sampled from here, since it takes no cache of keys"
                f" and values ({problem}); serve it with another engine and name it openai:NAME with"
                " --base-url"
            ) from None
        self.num_prefilled += len(ids) - start
        self._token_bytes = max(self._token_bytes, _size(cache) / len(ids))
        return _Slot(row, cache, out.logits[0, -1])

    def _feed(self, ids: Sequence[int], start: int, cache: Any) -> Any:
        """The module's output for the tokens of one row from `start` on; the cache grows by them."""
        device = next(iter(self._model.parameters())).device
        return self._model(
            input_ids=torch.tensor([[*ids]], device=device),
            position_ids=torch.arange(start, start + len(ids), device=device)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )

    def _draw(self, slots: Sequence[_Slot]) -> list[DecodingRow]:
        """Sample one token for each row. Returns the rows that finished with it, which are decoded no more.

        Caches of finished rows are kept for their owners.
        """
        if not slots:
            return []
        rows = [slot.row for slot in slots]
        logits_BV = torch.stack([slot.logits_V for slot in slots])
        drawn = draw(
            logits_BV, [row.request.sampling for row in rows], [row.uniform for row in rows],
            shaped_logits(rows, logits_BV),
        )  # fmt: skip
        top = likeliest_tokens(rows, logits_BV)
        for row, token, logprob, likeliest in zip(rows, *drawn, top, strict=True):
            row.take(token, logprob, likeliest)
        ended = [slot for slot in slots if slot.row.finish is not None]
        self._slots = [slot for slot in self._slots if slot not in ended]
        for slot in ended:
            self._retain(slot)
        return [slot.row for slot in ended]

    def _retain(self, slot: _Slot) -> None:
        owner = slot.row.request.owner
        if owner is None:
            return
        self._retained.pop(owner, None)
        needed = self._row_bytes(self.decoding) + _size(slot.cache)
        self._evict(needed)
        if needed <= self._max_bytes:
            self._retained[owner] = _Retained((*slot.row.request.ids, *slot.row.ids)[:-1], slot.cache)


def _size(cache: Any) -> int:
    """Bytes of a cache: keys, values, and the states of linear attention and convolutions."""
    held = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [t for value in held for t in (value.values() if isinstance(value, dict) else [value])]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; restores the mode of every submodule afterwards.

    `no_grad` and not `inference_mode`: buffers that a module creates lazily here must be usable in training.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
