"""The engine: batched generation and scoring with one in-process causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nano_coder.sampler import Sampler
from nano_shared import ContextFull, Finish, Sampling

_COMPACT_BELOW = 0.75
"""share of live rows under which finished rows are cut out of the cache; copying it costs about a step"""
_SCORE_TOKENS = 2048
"""padded tokens of one scoring batch, which bounds the memory of its logits"""


@dataclass(frozen=True, slots=True)
class Request:
    ids: tuple[int, ...]
    """[L] the full row so far"""
    sampling: Sampling
    seed: int | None = None
    """None draws a seed from the operating system"""


@dataclass(frozen=True, slots=True)
class Sampled:
    ids: tuple[int, ...]
    """[M] sampled tokens, the end-of-turn token included when it was sampled"""
    logprobs: tuple[float, ...]
    """[M] of the distribution that was sampled from, in float32"""
    finish: Finish


class Engine:
    """Samples from, and scores with, a live Hugging Face causal language model. Not thread-safe.

    The module may be one in training: it is put into eval mode for the call and put back after it, and no
    autograd state or inference tensor outlives the call.
    """

    def __init__(
        self, model: torch.nn.Module, *, eos_ids: frozenset[int], pad_id: int, context_limit: int
    ) -> None:
        self.model = model
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.context_limit = context_limit

    def generate(self, requests: Sequence[Request]) -> list[Sampled]:
        """One completion a request, in order. What a row draws never depends on the rest of the batch.

        Rows end with an end-of-turn token, at `sampling.max_tokens`, or where the context is full.
        Raises ContextFull if a row leaves no room for a token.
        """
        if not requests:
            return []
        for request in requests:
            if not 0 < len(request.ids) < self.context_limit:
                raise ContextFull(
                    f"a row of {len(request.ids)} tokens leaves no room in a context of {self.context_limit}"
                )
        with _evaluating(self.model):
            return _Batch(self, requests).run()

    def score(self, rows: Sequence[tuple[int, ...]], temperature: float = 1.0) -> list[list[float]]:
        """Teacher-forced log-probs of `row[1:]` for each row of [L] ids: lists of L - 1, in float32."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores: list[list[float]] = [[] for _ in rows]
        with _evaluating(self.model):
            while order:
                size = max(1, _SCORE_TOKENS // max(1, len(rows[order[-1]])))
                batch, order = order[-size:], order[:-size]
                for i, row_scores in zip(
                    batch, self._score([rows[i] for i in batch], temperature), strict=True
                ):
                    scores[i] = row_scores
        return scores

    def _score(self, rows: list[tuple[int, ...]], temperature: float) -> Iterator[list[float]]:
        width = max(map(len, rows))
        device = self.device
        # Padding on the right needs no mask: causal attention never looks there.
        padded = torch.tensor([[*row, *[self.pad_id] * (width - len(row))] for row in rows], device=device)
        logits = self.model(input_ids=padded, use_cache=False).logits
        for row, row_logits in zip(rows, logits, strict=True):
            targets = torch.tensor(row[1:], dtype=torch.long, device=device)
            logprobs = torch.log_softmax(row_logits[: len(targets)].float() / (temperature or 1.0), dim=-1)
            yield logprobs.gather(1, targets[:, None])[:, 0].tolist()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


class _Batch:
    """One batch of rows on their way from prompt to completion.

    Suffix _B: one entry a live row. Rows are padded on the left, so that all of them write the same column
    of the cache.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.engine = engine
        self.limits = [min(r.sampling.max_tokens, engine.context_limit - len(r.ids)) for r in requests]
        self.requests = requests
        self.ids: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.rows_B = list(range(len(requests)))
        """which request each live row of the cache belongs to"""
        self.sampler = Sampler([(r.sampling, r.seed) for r in requests], self.limits, engine.device)

    def run(self) -> list[Sampled]:
        logits_BV = self._prefill()
        for step in range(max(self.limits)):
            tokens_B, logprobs_B = self.sampler.draw(logits_BV, step)
            live = self._record(tokens_B.tolist(), logprobs_B.tolist())
            if not live:
                break
            if len(live) < _COMPACT_BELOW * len(self.rows_B):
                tokens_B = self._keep(live, tokens_B)
            logits_BV = self._decode(tokens_B)
        return [self._sampled(i) for i in range(len(self.requests))]

    def _prefill(self) -> torch.Tensor:
        """Read the prompts, each distinct one once. [B, V] logits of the first sampled position."""
        distinct = list(dict.fromkeys(r.ids for r in self.requests))
        width = max(map(len, distinct))
        device = self.engine.device
        pad = self.engine.pad_id
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in distinct], device=device)
        lengths = torch.tensor([len(p) for p in distinct], device=device)
        mask = torch.arange(width, device=device) >= (width - lengths)[:, None]
        positions = (torch.arange(width, device=device) - (width - lengths)[:, None]).clamp(min=0)
        padded = bool((lengths < width).any())
        out = self.engine.model(
            input_ids=ids,
            attention_mask=mask.long() if padded else None,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        self.cache: Any = out.past_key_values
        index = {prompt: row for row, prompt in enumerate(distinct)}
        expand = torch.tensor([index[r.ids] for r in self.requests], device=device)
        if len(distinct) < len(self.requests):
            self.cache.batch_select_indices(expand)
        self.positions_B = lengths[expand][:, None]
        room = mask.new_ones((len(self.requests), max(self.limits)))
        self.mask_BL = torch.cat([mask[expand], room], dim=1).long() if padded else None
        self.width = width
        logits: torch.Tensor = out.logits[expand, -1]
        return logits

    def _decode(self, tokens_B: torch.Tensor) -> torch.Tensor:
        """Feed one token a row. [B, V] logits of the next position."""
        self.width += 1
        out = self.engine.model(
            input_ids=tokens_B[:, None],
            attention_mask=None if self.mask_BL is None else self.mask_BL[:, : self.width],
            position_ids=self.positions_B,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.positions_B = self.positions_B + 1
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def _record(self, tokens: list[int], logprobs: list[float]) -> list[int]:
        """Note what each row drew; the places in the batch whose rows go on."""
        live = []
        for place, row in enumerate(self.rows_B):
            ids = self.ids[row]
            if len(ids) == self.limits[row] or (ids and ids[-1] in self.engine.eos_ids):
                continue  # finished earlier, and still in the batch because cutting it out did not pay
            ids.append(tokens[place])
            self.logprobs[row].append(logprobs[place])
            if tokens[place] not in self.engine.eos_ids and len(ids) < self.limits[row]:
                live.append(place)
        return live

    def _keep(self, live: list[int], tokens_B: torch.Tensor) -> torch.Tensor:
        """Cut the other rows out of everything that has one entry a row."""
        keep = torch.tensor(live, device=tokens_B.device)
        self.rows_B = [self.rows_B[place] for place in live]
        self.cache.batch_select_indices(keep)
        self.positions_B = self.positions_B[keep]
        if self.mask_BL is not None:
            self.mask_BL = self.mask_BL[keep]
        self.sampler.keep(keep)
        return tokens_B[keep]

    def _sampled(self, row: int) -> Sampled:
        ids = self.ids[row]
        finish = Finish.STOP if ids[-1] in self.engine.eos_ids else Finish.LENGTH
        return Sampled(tuple(ids), tuple(self.logprobs[row]), finish)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and every module back in its own mode afterwards.

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
