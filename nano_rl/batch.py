"""Micro-batches by token budget, all carrying one global denominator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nano_rl.sample import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded rows. Everything but `ids` and `attention` is aligned with the token it speaks of."""

    ids_BT: torch.Tensor
    """int64 [B, T]"""
    attention_BT: torch.Tensor
    """int64 [B, T], 1 on real tokens"""
    mask_BT: torch.Tensor
    """bool [B, T], true on sampled tokens"""
    behaviour_BT: torch.Tensor
    """float32 [B, T] log-probs when the token was sampled; 0 off the mask"""
    advantages_B: torch.Tensor
    """float32 [B]"""
    temperatures_B: torch.Tensor
    """float32 [B]"""
    num_action_tokens: int
    """sampled tokens of the whole optimizer step: the denominator of every token mean"""


def make_batches(
    samples: Sequence[TrainSample], *, max_tokens: int, num_action_tokens: int | None = None
) -> list[Batch]:
    """Rows in micro-batches of at most `max_tokens` padded tokens (one row at least), longest first.

    The denominator is global, so the gradient does not depend on the split.
    """
    total = num_action_tokens if num_action_tokens is not None else sum(s.num_action_tokens for s in samples)
    rows = sorted(samples, key=lambda sample: -len(sample.ids))  # the worst case first
    batches: list[list[TrainSample]] = []
    for row in rows:
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].ids) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_collate(batch, total) for batch in batches]


def _collate(rows: Sequence[TrainSample], total: int) -> Batch:
    shape = (len(rows), len(rows[0].ids))
    ids = torch.zeros(shape, dtype=torch.int64)
    attention = torch.zeros(shape, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    behaviour = torch.zeros(shape, dtype=torch.float32)
    for b, row in enumerate(rows):
        length = len(row.ids)
        ids[b, :length] = torch.tensor(row.ids)
        attention[b, :length] = 1
        mask[b, :length] = torch.tensor(row.mask, dtype=torch.bool)
        behaviour[b, :length] = torch.tensor(row.logprobs)
    return Batch(
        ids_BT=ids,
        attention_BT=attention,
        mask_BT=mask,
        behaviour_BT=behaviour,
        advantages_B=torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        temperatures_B=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        num_action_tokens=total,
    )
