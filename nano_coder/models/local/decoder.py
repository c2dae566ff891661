"""Chooses a decoder: continuous batching if our forward pass reproduces the model's logits, else the model's
own forward pass, row by row."""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nano_coder.models.local.continuous_batching import ContinuousDecoder
from nano_coder.models.local.llama import LlamaForward, Unsupported
from nano_coder.models.local.module_decoder import ModuleDecoder, evaluating

_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.02}
"""largest deviation of our logits from the module's, as a share of their own spread: rounding alone makes
up to 0.06 of thirty layers in bfloat16, a wrong forward pass about 1, one wrong layer of many mostly more
than 0.2"""
_EXACT = (torch.float32, torch.float64)
"""where no token may deviate more. Elsewhere the median may not: rounding grows without bound at some tokens,
and the module of Gemma 3 270M in bfloat16 is up to 0.7 from itself in float32"""
_PROBE_TOKENS = 12

_reasons: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""why a module cannot use continuous batching; empty if it can"""


def choose_decoder(model: nn.Module, *, max_batch: int, max_bytes: int) -> ContinuousDecoder | ModuleDecoder:
    """The fastest decoder that is correct for this model; says on stderr, once a model, if it is the slow
    one."""
    known, reason = model in _reasons, _reasons.get(model, "")
    try:
        decoder = ContinuousDecoder(LlamaForward(model), max_batch=max_batch, max_bytes=max_bytes)
        if not known:
            reason = _disagreement(model, decoder)
    except Unsupported as problem:
        reason = str(problem)
    _reasons[model] = reason
    if not reason:
        return decoder
    if not known:
        print(
            f"nano: this model decodes through transformers, which is slower: {reason}",
            file=sys.stderr,
            flush=True,
        )
    return ModuleDecoder(model, max_batch=max_batch, max_bytes=max_bytes)


def _disagreement(model: Any, decoder: ContinuousDecoder) -> str:
    """Why our forward pass must not be used for this model, whose logits it is compared with; empty if it
    may. A module can be changed in ways that its configuration does not tell."""
    dtype, device = next(model.parameters()).dtype, next(model.parameters()).device
    tolerance = _TOLERANCE.get(dtype)
    if tolerance is None:
        return f"its weights are {dtype}"
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = tuple(17 * i % vocabulary for i in range(1, _PROBE_TOKENS + 2))
    with evaluating(model):
        logits = model(input_ids=torch.tensor([ids[:-1]], device=device), use_cache=False).logits[0].float()
        ours = decoder.logits_of(ids, 1).float()
    spread_N = (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)
    away_N = (ours - logits).norm(dim=-1) / spread_N
    worst = float(away_N.max() if dtype in _EXACT else away_N.median())
    if worst <= tolerance:
        return ""
    return f"our logits deviate from its own by {worst:.2g} of their spread, more than {tolerance:g}"
