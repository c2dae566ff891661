"""Micro-batches: padded samples, with rows that share a prefix together and each token's share of the loss.

The model runs over the token tree of the rows (`prefix_tree.py`), so that padding costs memory for a few
columns only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from nano_rl.learn.groups import TrainSample
from nano_rl.learn.prefix_tree import common_prefix

ENOUGH = 1024
"""tokens of a micro-batch beyond which larger ones are no faster on a CPU and need more memory"""
_Placed = tuple[TrainSample, int]


@dataclass(frozen=True, slots=True)
class _Bin:
    cost: int
    """tokens of the forward pass, shared prefixes counted once"""
    rows: list[_Placed]

    def cost_with(self, after: _Bin) -> int:
        """The cost of both together; `after` is next in the order."""
        return self.cost + after.cost - common_prefix(self.rows[-1][0].ids, after.rows[0][0].ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """B rows padded on the right to T tokens; every column at position t belongs to token t. Token t is
    predicted from the tokens before it, so that position 0 is never trained."""

    ids_BT: Tensor
    """int64; 0 in the padding"""
    attention_BT: Tensor
    """int64; 1 on tokens, 0 on padding"""
    mask_BT: Tensor
    """bool; True on tokens that are trained"""
    behaviour_logprobs_BT: Tensor
    """log-probs of the sampler, nats at the row's temperature; 0 where the mask is False"""
    advantages_BT: Tensor
    """advantages of trained tokens; 0 elsewhere"""
    weight_BT: Tensor
    """share of each trained token: the loss is the sum of share x token loss; 0 elsewhere"""
    temperature_B: Tensor
    """sampling temperature of each row"""
    run_ids: tuple[str, ...]
    """[B]"""
    old_logprobs_BT: Tensor | None = None
    """the trainer's log-probs at the start of the step; None if the weights have not changed since"""
    reference_logprobs_BT: Tensor | None = None
    """log-probs of the reference model; required if beta > 0"""

    def with_old(self, logprobs_BT: Tensor) -> Batch:
        return replace(self, old_logprobs_BT=logprobs_BT.detach().to(self.ids_BT.device))

    def with_reference(self, logprobs_BT: Tensor) -> Batch:
        return replace(self, reference_logprobs_BT=logprobs_BT.detach().to(self.ids_BT.device))

    def to(self, device: torch.device | str) -> Batch:
        columns = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        there: dict[str, Any] = {name: value.to(device) for name, value in columns.items()}
        return replace(self, **there)


def make_batches(
    samples: Sequence[TrainSample], *, max_tokens: int, weights: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float32, trees: bool = True, enough: int = ENOUGH,
) -> list[Batch]:  # fmt: skip
    """Micro-batches of at most `max_tokens` positions of the forward pass, the most expensive first.

    A shared prefix counts once, and rows that share one stay together; rows that share little are combined up
    to `enough` tokens only, to save memory for the backward pass. With `trees` False, for models that cannot
    merge rows, padded positions are counted. A longer row gets a micro-batch of its own.

    `weights` is [S] the share of each trained token of each sample; None is 1 / the trained tokens of all.
    Raises ValueError if `max_tokens` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1")
    if weights is None:
        weights = [1 / max(sum(s.num_action_tokens for s in samples), 1)] * len(samples)
    weighted = list(zip(samples, weights, strict=True))
    parts = split_samples(samples, max_tokens=max_tokens, trees=trees, enough=enough)
    return [_collate([weighted[place] for place in part], dtype) for part in parts]


def enough_tokens(device: torch.device, max_tokens: int) -> int:
    """Tokens up to which rows that share little are combined: all that fit on a GPU, which a few do not
    fill."""
    return ENOUGH if device.type == "cpu" else max_tokens


def split_samples(
    samples: Sequence[TrainSample], *, max_tokens: int, trees: bool, enough: int = ENOUGH
) -> list[list[int]]:
    """The indices in `samples` of the rows of each micro-batch, as `make_batches` splits them."""
    placed = [(sample, place) for place, sample in enumerate(samples)]
    split = _split_trees(placed, max_tokens, enough) if trees else _split_rows(placed, max_tokens)
    return [[place for _, place in part] for part in split]


def _split_trees(samples: Sequence[_Placed], max_tokens: int, enough: int) -> list[list[_Placed]]:
    """Rows that share a long prefix together up to `max_tokens`; others up to `enough` tokens."""
    enough = min(max_tokens, enough)
    parts: list[_Bin] = []
    for family in _families(samples, max_tokens, least=enough // 8):
        if parts and (cost := parts[-1].cost_with(family)) <= enough:
            parts[-1] = _Bin(cost, parts[-1].rows + family.rows)
        else:
            parts.append(family)
    return [part.rows for part in sorted(parts, key=lambda part: -part.cost)]


def _families(samples: Sequence[_Placed], max_tokens: int, *, least: int) -> list[_Bin]:
    """Rows in sorted order, combined if they share a prefix of at least `least` tokens."""
    families: list[_Bin] = []
    for sample in sorted(samples, key=lambda s: s[0].ids):
        row = _Bin(len(sample[0].ids), [sample])
        cost = families[-1].cost_with(row) if families else 0
        if families and cost <= max_tokens and families[-1].cost + row.cost - cost >= least:
            families[-1] = _Bin(cost, [*families[-1].rows, sample])
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


def _collate(weighted: Sequence[tuple[TrainSample, float]], dtype: torch.dtype) -> Batch:
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
        run_ids=tuple(s.run_id for s in rows),
    )
