"""The choice of a decoder: ours, if the model is of a known family and our logits are those of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nano_coder.models.local.decoding.continuous_batching import ContinuousDecoder, Seat
from nano_coder.models.local.decoding.llama import LlamaForward, Unsupported
from nano_coder.models.local.decoding.padded_batching import PaddedDecoder, evaluating
from nano_coder.models.local.decoding.row import Ends, Request, Row
from nano_shared import ContextFull, Sampling

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.02}
"""largest deviation of our logits from the module's, as a share of their own spread: rounding alone makes
up to 0.06 of thirty layers in bfloat16, a wrong forward pass about 1"""
_PROBE_BYTES = 1 << 26
_PROBE_TOKENS = 15

_reasons: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""why each module seen so far is not decoded by ourselves; empty if it is"""


def choose_decoder(
    model: nn.Module, *, context_limit: int, pad_id: int, max_batch: int, max_bytes: int
) -> ContinuousDecoder | PaddedDecoder:
    """The quickest decoder that is right for this model; says once on stderr if that is the model's own."""
    try:
        forward = LlamaForward(model)
        if model not in _reasons:
            _reasons[model] = _disagreement(model, forward, context_limit)
            _say(_reasons[model])
        if not _reasons[model]:
            return ContinuousDecoder(forward, max_batch=max_batch, max_bytes=max_bytes)
    except Unsupported as problem:
        if model not in _reasons:
            _reasons[model] = str(problem)
            _say(_reasons[model])
    return PaddedDecoder(model, pad_id=pad_id, max_batch=max_batch)


def _say(reason: str) -> None:
    if reason:
        print(
            f"nano: this model decodes through transformers, which is slower: {reason}",
            file=sys.stderr,
            flush=True,
        )


class _Watched(ContinuousDecoder):
    """Notes the logits that each token was drawn from."""

    def __init__(self, forward: LlamaForward) -> None:
        super().__init__(forward, max_batch=4, max_bytes=_PROBE_BYTES)
        self.seen: list[tuple[Row, Tensor]] = []

    def _draw(
        self, seats: Sequence[Seat], drafts: Sequence[list[int]], logits_NV: Tensor, *, fed: bool = False
    ) -> list[Row]:
        rows = [seat.row for seat in seats]
        had = [len(row.ids) for row in rows]
        finished = super()._draw(seats, drafts, logits_NV, fed=fed)
        first = 0
        for row, before, draft in zip(rows, had, drafts, strict=True):
            self.seen += [(row, logits_NV[first + nth]) for nth in range(len(row.ids) - before)]
            first += 1 + len(draft)
        return finished


def _disagreement(model: Any, forward: LlamaForward, context_limit: int) -> str:
    """Why our forward pass is not to be trusted with this model; empty if it is.

    Rows on one prompt are decoded for a few tokens, one of them goes on after an observation, and another
    comes again: every path that a real row takes. The logits must be those of the module's own forward pass.
    """
    tolerance = _TOLERANCE.get(forward.dtype)
    if tolerance is None:
        return f"its weights are {forward.dtype}"
    tokens = [17 * i % forward.vocabulary for i in range(1, _PROBE_TOKENS)]
    ends = Ends((), context_limit)
    sampling = Sampling(max_tokens=3)
    watched = _Watched(forward)
    with evaluating(model):
        try:
            rows = [Row(Request(tuple(tokens[:9]), sampling, seed, owner=seed), ends) for seed in range(2)]
            _decode(watched, rows)
            longer = (*rows[0].request.ids, *rows[0].ids, *tokens[9:])
            # and what the first row said, drafted from it
            rows += [
                Row(Request(longer, sampling, 0, owner=0), ends),
                Row(replace(rows[0].request, owner=2), ends),
            ]
            _decode(watched, rows[2:])
        except ContextFull:
            return f"its context of {context_limit} tokens is too short for a check"
        worst = 0.0
        for row in rows:
            ids = torch.tensor([[*row.request.ids, *row.ids]], device=forward.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(row.request.ids) - 1 : -1].float()
            ours = torch.stack([seen for drawn, seen in watched.seen if drawn is row]).float()
            worst = max(
                worst, float((ours - logits).norm() / (logits - logits.mean(-1, keepdim=True)).norm())
            )
    if worst <= tolerance:
        return ""
    return f"our logits deviate from its own by {worst:.2g} of their spread, more than {tolerance:g}"


def _decode(decoder: ContinuousDecoder, rows: Sequence[Row]) -> None:
    decoder.admit(rows)
    while decoder.busy:
        decoder.step()
