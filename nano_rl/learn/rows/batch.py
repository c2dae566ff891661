"""Micro-batches: rows that share prefixes stay together, and each token carries its share of the step's loss.

The rows of a batch are padded, which costs a few bytes a position; the model runs over their token tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from nano_rl.learn.rows.sample import TrainSample
from nano_rl.learn.trees.prefix_tree import common_prefix

ENOUGH = 1024
"""tokens of a micro-batch from which on more of them at once are no faster, and take memory"""
_Placed = tuple[TrainSample, int]
"""a sample, and its place among all"""


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbours of one micro-batch, in the order of their tokens."""

    cost: int
    """tokens to forward, a shared prefix counted once"""
    rows: list[_Placed]

    def cost_with(self, after: _Part) -> int:
        """Of both together, `after` being next in order."""
        return self.cost + after.cost - common_prefix(self.rows[-1][0].ids, after.rows[0][0].ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B rows padded on the right to T tokens. Position t holds token t and what belongs to *that* token:
    its log-prob is predicted from the tokens before it, so position 0 is never trained."""

    ids_BT: Tensor
    """int64; 0 in the padding"""
    attention_BT: Tensor
    """int64; 1 on tokens, 0 on padding"""
    mask_BT: Tensor
    """bool; True on tokens that are trained"""
    behaviour_logprobs_BT: Tensor
    """log-probs of the sampler, nats at the row's temperature; 0 where the mask is False"""
    advantages_BT: Tensor
    """the advantage of the row, or of its turn, on trained tokens; 0 elsewhere"""
    weight_BT: Tensor
    """each trained token's share of the loss, which is the sum of weight x token loss; 0 elsewhere"""
    temperature_B: Tensor
    """sampling temperature of each row"""
    num_action_tokens: int
    """trained tokens of the whole step, over all micro-batches and ranks: a count, already in the weights"""
    run_ids: tuple[str, ...]
    """[B]"""
    keys: tuple[str, ...] = ()
    """[B] `TrainSample.key` of each row; empty in a slice of tokens"""
    old_logprobs_BT: Tensor | None = None
    """the trainer's own log-probs at the start of the step; None where the weights have not moved since"""
    reference_logprobs_BT: Tensor | None = None
    """log-probs of the reference model, needed where beta > 0"""

    def with_old(self, logprobs_BT: Tensor) -> Batch:
        """The same batch with the trainer's log-probs at the start of the step."""
        return replace(self, old_logprobs_BT=logprobs_BT.detach())

    def with_reference(self, logprobs_BT: Tensor) -> Batch:
        """The same batch with the reference model's log-probs."""
        return replace(self, reference_logprobs_BT=logprobs_BT.detach())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return replace(self, **{name: value.to(device) for name, value in self._tensors().items()})

    def tokens(self, rows_N: Tensor, positions_N: Tensor) -> Batch:
        """N of its tokens as rows of one token each, with every column of theirs: all that an objective
        needs which is separable over tokens."""
        place = rows_N, positions_N
        columns = {n: v[place][:, None] if v.ndim > 1 else v[rows_N] for n, v in self._tensors().items()}
        run_ids = tuple(self.run_ids[row] for row in rows_N.tolist())
        return replace(self, run_ids=run_ids, keys=(), **columns)

    def _tensors(self) -> dict[str, Any]:
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}


def make_batches(
    samples: Sequence[TrainSample],
    *,
    max_tokens: int,
    weights: Sequence[float] | None = None,
    num_action_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    trees: bool = True,
) -> list[Batch]:
    """Micro-batches of at most `max_tokens` positions to forward, the most expensive first.

    A shared prefix counts once, and rows that share one stay neighbours. No head runs on more than the
    positions, so that they bound its work too. Rows that share little are put together up to `ENOUGH` tokens
    alone: what is kept for the backward pass is most of a step's memory. `trees` False counts what a model
    needs that cannot merge rows (`logprob.can_share`): padded rows, longest first. A row longer than
    `max_tokens` gets a micro-batch of its own.

    `weights` are [S] what every trained token of each sample weighs (`aggregation.token_weights`); None is
    the token mean, 1 / `num_action_tokens`, which defaults to the trained tokens of all samples: several
    ranks pass their common sum.
    `dtype` is that of log-probs, advantages, weights and temperatures. Ties keep the order of `samples`.

    Raises ValueError when a budget or the denominator is below 1, and unless there is a weight a sample.
    """
    if max_tokens < 1 or (num_action_tokens is not None and num_action_tokens < 1):
        raise ValueError(
            f"max_tokens={max_tokens} and num_action_tokens={num_action_tokens} must be at least 1"
        )
    if num_action_tokens is None:
        num_action_tokens = sum(s.num_action_tokens for s in samples)
    if weights is None:
        weights = [1 / max(num_action_tokens, 1)] * len(samples)
    weighted = list(zip(samples, weights, strict=True))
    parts = split_samples(samples, max_tokens=max_tokens, trees=trees)
    return [_collate([weighted[place] for place in part], num_action_tokens, dtype) for part in parts]


def split_samples(samples: Sequence[TrainSample], *, max_tokens: int, trees: bool) -> list[list[int]]:
    """The places in `samples` of each micro-batch's rows, as `make_batches` puts them together."""
    placed = [(sample, place) for place, sample in enumerate(samples)]
    split = _split_trees if trees else _split_rows
    return [[place for _, place in part] for part in split(placed, max_tokens)]


def _split_trees(samples: Sequence[_Placed], max_tokens: int) -> list[list[_Placed]]:
    """Rows that share much stay together up to `max_tokens`; others only up to what is enough at once."""
    enough = min(max_tokens, ENOUGH)
    parts: list[_Part] = []
    for family in _families(samples, max_tokens, least=enough // 8):
        if parts and (cost := parts[-1].cost_with(family)) <= enough:
            parts[-1] = _Part(cost, parts[-1].rows + family.rows)
        else:
            parts.append(family)
    return [part.rows for part in sorted(parts, key=lambda part: -part.cost)]


def _families(samples: Sequence[_Placed], max_tokens: int, *, least: int) -> list[_Part]:
    """Neighbours that share a prefix of `least` tokens, so that to part them forwards it once more."""
    families: list[_Part] = []
    for sample in sorted(samples, key=lambda s: s[0].ids):
        row = _Part(len(sample[0].ids), [sample])
        cost = families[-1].cost_with(row) if families else 0
        if families and cost <= max_tokens and families[-1].cost + row.cost - cost >= least:
            families[-1] = _Part(cost, [*families[-1].rows, sample])
        else:
            families.append(row)
    return families


def _split_rows(samples: Sequence[_Placed], max_tokens: int) -> Iterator[list[_Placed]]:
    rows: list[_Placed] = []
    for sample in sorted(samples, key=lambda s: -len(s[0].ids)):
        if rows and (len(rows) + 1) * len(rows[0][0].ids) > max_tokens:
            yield rows
            rows = []
        rows.append(sample)
    if rows:
        yield rows


def _collate(
    weighted: Sequence[tuple[TrainSample, float]], num_action_tokens: int, dtype: torch.dtype
) -> Batch:
    rows = [sample for sample, _ in weighted]
    width = max(len(s.ids) for s in rows)

    def pad(arrays: Sequence[Sequence[float]], kind: torch.dtype) -> Tensor:
        return torch.tensor([[*a, *[0] * (width - len(a))] for a in arrays], dtype=kind)

    return Batch(
        ids_BT=pad([s.ids for s in rows], torch.int64),
        attention_BT=pad([[1] * len(s.ids) for s in rows], torch.int64),
        mask_BT=pad([s.mask for s in rows], torch.bool),
        behaviour_logprobs_BT=pad([s.logprobs for s in rows], dtype),
        advantages_BT=pad([[m * a for m, a in zip(s.mask, s.advantages, strict=True)] for s in rows], dtype),
        weight_BT=pad([[m * w for m in s.mask] for s, w in weighted], dtype),
        temperature_B=torch.tensor([s.temperature for s in rows], dtype=dtype),
        num_action_tokens=num_action_tokens,
        run_ids=tuple(s.run_id for s in rows),
        keys=tuple(s.key for s in rows),
    )
