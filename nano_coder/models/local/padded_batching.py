"""Decoding by the model's own forward pass, for models without one of ours.

Every row has a cache of transformers of its own, which is kept for the next turn of its owner. Rows join and
leave the batch at any step. A decoding step joins the caches, keys and values padded on the left; caches with
a sliding window cannot be joined, and such rows are fed one after another.
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
from torch.nn import functional as F

from nano_coder.models.local.sampler import DecodingRow, draw, likeliest_tokens, shaped_logits
from nano_shared.errors import UsageError

_JOINED = ("DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
"""kinds of cache layers that can be joined along the batch"""
_STATES = ("conv_states", "recurrent_states")
"""state of linear attention and convolutions, whose size does not depend on the row's length"""


@dataclass(slots=True, eq=False)
class _Slot:
    row: DecodingRow
    cache: Any
    """of this row alone; of a row in a `_Batch` it is out of date"""
    logits_V: Tensor


@dataclass(slots=True, eq=False)
class _Batch:
    """Rows that are fed together."""

    slots: list[_Slot]
    cache: Any
    padding_B: list[int]
    """positions of padding on the left of each row's keys"""


@dataclass(frozen=True, slots=True, eq=False)
class _Retained:
    ids: tuple[int, ...]
    """tokens in the cache"""
    cache: Any


class PaddedDecoder:
    """Decodes queued rows, `max_batch` at a time."""

    def __init__(self, model: nn.Module, *, max_batch: int, max_bytes: int) -> None:
        """`max_bytes` bounds the caches of the rows being decoded and those retained together. Several rows
        take half of it at most. One layer's keys and values may stand in it twice, as they grow."""
        self._model: Any = model
        self._max_batch = max_batch
        self._max_bytes = max_bytes
        self._queue: deque[DecodingRow] = deque()
        self._slots: list[_Slot] = []
        self._batches: list[_Batch] | None = None
        """None after the rows have changed"""
        self._retained: dict[int, _Retained] = {}
        self._token_bytes = 0.0
        """largest size of a cache by its tokens that was seen"""
        self.num_prefilled = 0
        """tokens that were fed beside those that were sampled in the batch"""

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
            if self._slots:
                self._feed()
                finished += self._draw(list(self._slots))
        return finished

    def drop(self, rows: Sequence[DecodingRow]) -> None:
        """Stop decoding these rows."""
        self._queue = deque(row for row in self._queue if row not in rows)
        self._leave([slot for slot in self._slots if slot.row in rows])

    def release(self, owner: int) -> None:
        """Forget the row retained for this owner."""
        self._retained.pop(owner, None)

    def clear(self) -> None:
        """Forget every row and all caches."""
        self._queue.clear()
        self._slots.clear()
        self._batches = None
        self._retained.clear()

    @property
    def cache_bytes(self) -> int:
        """Size of the retained caches."""
        return sum(_size(kept.cache) for kept in self._retained.values())

    def _row_bytes(self, rows: Sequence[DecodingRow]) -> float:
        """Most bytes of the caches of these rows in one batch."""
        longest = max((len(row.request.ids) + row.limit for row in rows), default=0)
        return len(rows) * longest * self._token_bytes

    def _evict(self, others: float) -> None:
        """Forget the rows retained longest until the rest and `others` bytes keep the budget."""
        while self._retained and self.cache_bytes + others > self._max_bytes:
            del self._retained[next(iter(self._retained))]

    def _join(self) -> list[_Slot]:
        """Move queued rows into the batch and prefill what their caches lack. Rows of one prompt share the
        prefill."""
        joined: list[_Slot] = []
        while self._queue and len(self._slots) < self._max_batch:
            row = self._queue[0]
            needed = self._row_bytes([*self.decoding, row])
            if self._slots and 2 * needed > self._max_bytes:
                break
            self._evict(needed)
            self._split()
            slot = self._prefill(self._queue.popleft(), joined)
            self._slots.append(slot)
            joined.append(slot)
        return joined

    def _prefill(self, row: DecodingRow, joined: Sequence[_Slot]) -> _Slot:
        ids = row.request.ids
        kept = self._retained.pop(row.request.owner, None) if row.request.owner is not None else None
        if kept is None or len(kept.ids) >= len(ids) or ids[: len(kept.ids)] != kept.ids:
            for other in joined:
                if other.row.request.ids == ids:
                    return _Slot(row, _own(other.cache), other.logits_V)
            kept = _Retained((), None)
        start, device = len(kept.ids), self._device
        try:
            out = self._model(
                input_ids=torch.tensor([ids[start:]], device=device),
                position_ids=torch.arange(start, len(ids), device=device)[None],
                past_key_values=kept.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            _ = out.past_key_values
        except (AttributeError, TypeError, ValueError) as problem:
            raise UsageError(
                f"{type(self._model).__name__} cannot be sampled from here, since it takes no cache of keys"
                f" and values ({problem}); serve it with another engine and name it openai:NAME with"
                " --base-url"
            ) from None
        self.num_prefilled += len(ids) - start
        self._token_bytes = max(self._token_bytes, _size(out.past_key_values) / len(ids))
        return _Slot(row, out.past_key_values, out.logits[0, -1])

    def _feed(self) -> None:
        """Feed the last token of each row, to get the logits of the next."""
        if self._batches is None:
            self._batches = _batches(self._slots)
        for batch in self._batches:
            rows, device = [slot.row for slot in batch.slots], self._device
            mask_BL = None
            if any(batch.padding_B):
                width = batch.padding_B[0] + rows[0].position + 1
                padding_B1 = torch.tensor(batch.padding_B, device=device)[:, None]
                mask_BL = (torch.arange(width, device=device) >= padding_B1).long()
            out = self._model(
                input_ids=torch.tensor([[row.ids[-1]] for row in rows], device=device),
                attention_mask=mask_BL,
                position_ids=torch.tensor([[row.position] for row in rows], device=device),
                past_key_values=batch.cache,
                use_cache=True,
            )
            for slot, logits_V in zip(batch.slots, out.logits[:, -1], strict=True):
                slot.logits_V = logits_V

    def _draw(self, slots: Sequence[_Slot]) -> list[DecodingRow]:
        """Sample one token for each row. Returns the rows that finished with it, which leave the batch."""
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
        self._leave(ended)
        return [slot.row for slot in ended]

    def _leave(self, slots: Sequence[_Slot]) -> None:
        """Take the rows out of the batch; keep the caches of those that finished for their owners."""
        if not slots:
            return
        self._split()
        decoding = self._row_bytes(self.decoding)
        self._slots = [slot for slot in self._slots if slot not in slots]
        for slot in slots:
            row, owner = slot.row, slot.row.request.owner
            if row.finish is not None and owner is not None:
                ids = (*row.request.ids, *row.ids)[:-1]
                self._retained.pop(owner, None)
                needed = decoding + _size(slot.cache)
                self._evict(needed)
                if needed <= self._max_bytes:
                    self._retained[owner] = _Retained(ids, _own(slot.cache))

    def _split(self) -> None:
        """Give each row its own cache back."""
        for batch in self._batches or ():
            for place, slot in enumerate(batch.slots):
                if len(batch.slots) > 1:
                    slot.cache = _row_of(batch.cache, place, batch.padding_B[place])
        self._batches = None

    @property
    def _device(self) -> torch.device:
        weight: Tensor = next(iter(self._model.parameters()))
        return weight.device


def _batches(slots: list[_Slot]) -> list[_Batch]:
    """All rows in one batch where their caches can be joined, which gives up their own, else a batch for
    each."""
    kinds = {type(layer).__name__ for slot in slots for layer in slot.cache.layers}
    if len(slots) == 1 or not kinds <= set(_JOINED):
        return [_Batch([slot], slot.cache, [0]) for slot in slots]
    # the last token is not in the cache
    lengths = [slot.row.position for slot in slots]
    padding = [max(lengths) - length for length in lengths]
    joined = copy.copy(slots[0].cache)
    joined.layers = []
    own = [slot.cache.layers for slot in slots]
    for slot in slots:
        slot.cache = None
    for _ in range(len(own[0])):
        layers = [one.pop(0) for one in own]
        layer = copy.copy(layers[0])
        joined.layers.append(layer)
        if getattr(layer, "keys", None) is not None:
            for name in ("keys", "values"):
                parts = zip((getattr(one, name) for one in layers), padding, strict=True)
                setattr(layer, name, torch.cat([F.pad(part, (0, 0, left, 0)) for part, left in parts]))
        for name, states in _states(layer):
            each = [getattr(one, name) for one in layers]
            new = {key: torch.cat([one[key] for one in each]) for key in states if states[key] is not None}
            setattr(layer, name, {**states, **new})
    return [_Batch(list(slots), joined, padding)]


def _row_of(cache: Any, place: int, padding: int) -> Any:
    """The cache of one row of a joined cache; shares its memory."""
    row = copy.copy(cache)
    row.layers = []
    for joined in cache.layers:
        layer = copy.copy(joined)
        row.layers.append(layer)
        if getattr(layer, "keys", None) is not None:
            layer.keys = layer.keys[place : place + 1, :, padding:]
            layer.values = layer.values[place : place + 1, :, padding:]
        for name, states in _states(layer):
            own = {key: None if s is None else s[place : place + 1] for key, s in states.items()}
            setattr(layer, name, own)
    return row


def _own(cache: Any) -> Any:
    """A copy of the cache of one row, without the rest of the batch that it may be a part of."""
    mine = copy.copy(cache)
    mine.layers = []
    for layer in cache.layers:
        mine.layers.append(one := copy.copy(layer))
        for name in ("keys", "values"):
            if getattr(layer, name, None) is not None:
                setattr(one, name, getattr(layer, name).clone())
        for name, states in _states(layer):
            setattr(one, name, {key: None if s is None else s.clone() for key, s in states.items()})
    return mine


def _states(layer: Any) -> list[tuple[str, dict[int, Tensor | None]]]:
    return [(name, getattr(layer, name)) for name in _STATES if getattr(layer, name, None) is not None]


def _size(cache: Any) -> int:
    """Bytes of a cache."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    tensors += [state for layer in cache.layers for _, states in _states(layer) for state in states.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


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
