"""Decoding in padded batches through the module's own forward pass, for models that `llama.py` does not
cover.

Rows are padded on the left, so that a step writes one column of the module's cache. Each request is prefilled
from its first token: nothing is kept between requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nano_coder.models.local.row import DecodingRow
from nano_coder.models.local.sampler import draw

_COMPACT_BELOW = 0.75
"""share of live rows under which finished rows are cut out of the cache; copying it costs about a step"""


class PaddedDecoder:
    """Decodes queued rows, `max_batch` at a time; a batch starts when the one before has finished."""

    def __init__(self, model: nn.Module, *, pad_id: int, max_batch: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._max_batch = max_batch
        self._queue: deque[DecodingRow] = deque()
        self._batch: _Batch | None = None

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._batch)

    @property
    def decoding(self) -> list[DecodingRow]:
        return [] if self._batch is None else [row for row in self._batch.rows if row.finish is None]

    def admit(self, rows: Sequence[DecodingRow]) -> None:
        self._queue.extend(rows)

    def step(self) -> list[DecodingRow]:
        """Sample one token for each row of the batch. Returns the rows that finished."""
        with evaluating(self._model):
            if self._batch is None:
                count = min(self._max_batch, len(self._queue))
                if not count:
                    return []
                rows = [self._queue.popleft() for _ in range(count)]
                self._batch = _Batch(self._model, rows, self._pad_id)
            else:
                self._batch.feed()
        finished = self._batch.draw()
        if not self.decoding:
            self._batch = None
        return finished

    def drop(self, rows: Sequence[DecodingRow]) -> None:
        """Remove queued rows; one that is being decoded stays in its batch, and its result is not used."""
        self._queue = deque(row for row in self._queue if row not in rows)

    def release(self, owner: int) -> None:
        """Does nothing: no KV is kept between requests."""

    def clear(self) -> None:
        self._queue.clear()
        self._batch = None


class _Batch:
    """One batch and its cache. Suffix _B: one entry for each row of the cache; some may have finished."""

    def __init__(self, model: nn.Module, rows: list[DecodingRow], pad_id: int) -> None:
        self._model = model
        self.rows = rows
        device = next(model.parameters()).device
        distinct = list(dict.fromkeys(row.request.ids for row in rows))
        width = max(map(len, distinct))
        ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in distinct], device=device)
        lengths = torch.tensor([len(p) for p in distinct], device=device)
        mask = torch.arange(width, device=device) >= (width - lengths)[:, None]
        positions = (torch.arange(width, device=device) - (width - lengths)[:, None]).clamp(min=0)
        padded = bool((lengths < width).any())
        out = model(
            input_ids=ids,
            attention_mask=mask.long() if padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache: Any = out.past_key_values
        index = {prompt: place for place, prompt in enumerate(distinct)}
        expand = torch.tensor([index[row.request.ids] for row in rows], device=device)
        if len(distinct) < len(rows):
            self._cache.batch_select_indices(expand)
        room = mask.new_ones((len(rows), max(row.limit for row in rows)))
        self._mask_BL = torch.cat([mask[expand], room], dim=1).long() if padded else None
        self._width = width
        self._logits_BV: Tensor = out.logits[expand, -1]

    def draw(self) -> list[DecodingRow]:
        """Sample one token for each unfinished row. Returns the rows that finished with it."""
        places = [place for place, row in enumerate(self.rows) if row.finish is None]
        rows = [self.rows[place] for place in places]
        logits_BV = self._logits_BV if len(rows) == len(self.rows) else self._logits_BV[places]
        drawn = draw(logits_BV, [row.request.sampling for row in rows], [row.uniform for row in rows])
        for row, token, logprob in zip(rows, *drawn, strict=True):
            row.take(token, logprob)
        return [row for row in rows if row.finish is not None]

    def feed(self) -> None:
        """Feed the last token of each row, to get the logits of the next."""
        live = [place for place, row in enumerate(self.rows) if row.finish is None]
        device = self._logits_BV.device
        if len(live) < _COMPACT_BELOW * len(self.rows):
            keep = torch.tensor(live, device=device)
            self.rows = [self.rows[place] for place in live]
            self._cache.batch_select_indices(keep)
            if self._mask_BL is not None:
                self._mask_BL = self._mask_BL[keep]
        self._width += 1
        # finished rows are fed too; cutting them out did not pay yet
        out = self._model(
            input_ids=torch.tensor([[row.ids[-1]] for row in self.rows], device=device),
            attention_mask=None if self._mask_BL is None else self._mask_BL[:, : self._width],
            position_ids=torch.tensor([[row.position] for row in self.rows], device=device),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._logits_BV = out.logits[:, -1]


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
