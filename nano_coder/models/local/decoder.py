"""Chooses a decoder: continuous batching if our forward pass reproduces the model's logits, else padded
batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nano_coder.models.local.continuous_batching import BatchSlot, ContinuousDecoder
from nano_coder.models.local.llama import LlamaForward, Unsupported
from nano_coder.models.local.padded_batching import PaddedDecoder, evaluating
from nano_coder.models.local.sampler import DecodingRow, GenerationRequest, StopConditions
from nano_shared.errors import ContextFull
from nano_shared.types import Sampling

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.02}
"""largest deviation of our logits from the module's, as a share of their own spread: rounding alone makes
up to 0.06 of thirty layers in bfloat16, a wrong forward pass about 1, one wrong layer of many mostly more
than 0.2"""
_EXACT = (torch.float32, torch.float64)
"""where no token of a row may deviate more. Elsewhere the median of a row may not: rounding grows without
bound at some tokens, and the module of Gemma 3 270M in bfloat16 is up to 0.7 from itself in float32"""
_PROBE_BYTES = 1 << 26
_PROBE_TOKENS = 15

_reasons: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""why a module cannot use continuous batching; empty if it can"""


def choose_decoder(
    model: nn.Module, *, context_limit: int, max_batch: int, max_bytes: int
) -> ContinuousDecoder | PaddedDecoder:
    """The fastest decoder that is correct for this model; says on stderr, once a model, if it is the slow
    one."""
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
    return PaddedDecoder(model, max_batch=max_batch, max_bytes=max_bytes)


def _say(reason: str) -> None:
    if reason:
        print(
            f"nano: this model decodes through transformers, which is slower: {reason}",
            file=sys.stderr,
            flush=True,
        )


class _LogitRecorder(ContinuousDecoder):
    """Records the logits that each token was sampled from."""

    def __init__(self, forward: LlamaForward) -> None:
        super().__init__(forward, max_batch=4, max_bytes=_PROBE_BYTES)
        self.seen: list[tuple[DecodingRow, Tensor]] = []

    def _draw(
        self,
        slots: Sequence[BatchSlot],
        draft_tokens: Sequence[list[int]],
        logits_NV: Tensor,
        *,
        fed: bool = False,
    ) -> list[DecodingRow]:
        rows = [slot.row for slot in slots]
        had = [len(row.ids) for row in rows]
        finished = super()._draw(slots, draft_tokens, logits_NV, fed=fed)
        first = 0
        for row, before, draft_ids in zip(rows, had, draft_tokens, strict=True):
            self.seen += [(row, logits_NV[first + nth]) for nth in range(len(row.ids) - before)]
            first += 1 + len(draft_ids)
        return finished


def _disagreement(model: Any, forward: LlamaForward, context_limit: int) -> str:
    """Why our forward pass must not be used for this model; empty if it may.

    Decodes two rows that share a prompt, continues one of them after an observation, and repeats the other:
    shared prefix, retained row and draft tokens are all exercised. Compares the logits with those of the
    module's own forward pass.
    """
    tolerance = _TOLERANCE.get(forward.dtype)
    if tolerance is None:
        return f"its weights are {forward.dtype}"
    tokens = [17 * i % forward.vocabulary for i in range(1, _PROBE_TOKENS)]
    stop_conditions = StopConditions((), context_limit)
    sampling = Sampling(max_tokens=3)
    recorder = _LogitRecorder(forward)
    with evaluating(model):
        try:
            rows = [
                DecodingRow(GenerationRequest(tuple(tokens[:9]), sampling, seed, owner=seed), stop_conditions)
                for seed in range(2)
            ]
            _decode(recorder, rows)
            longer = (*rows[0].request.ids, *rows[0].ids, *tokens[9:])
            # the repeated prompt is decoded with draft tokens from the first row
            rows += [
                DecodingRow(GenerationRequest(longer, sampling, 0, owner=0), stop_conditions),
                DecodingRow(replace(rows[0].request, owner=2), stop_conditions),
            ]
            _decode(recorder, rows[2:])
        except ContextFull:
            return f"its context of {context_limit} tokens is too short for a check"
        worst = 0.0
        for row in rows:
            ids = torch.tensor([[*row.request.ids, *row.ids]], device=forward.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(row.request.ids) - 1 : -1].float()
            ours = torch.stack([seen for drawn, seen in recorder.seen if drawn is row]).float()
            spread_N = (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)
            away_N = (ours - logits).norm(dim=-1) / spread_N
            worst = max(worst, float(away_N.max() if forward.dtype in _EXACT else away_N.median()))
    if worst <= tolerance:
        return ""
    return f"our logits deviate from its own by {worst:.2g} of their spread, more than {tolerance:g}"


def _decode(decoder: ContinuousDecoder, rows: Sequence[DecodingRow]) -> None:
    decoder.admit(rows)
    while decoder.busy:
        decoder.step()
