"""The first look: what a step's first pass over its rows says of the log-probs that they came with.

It costs nothing: the passes are those of the update, and of the log-probs at the start of the step.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from nano_rl.learn.model.probe import Probe
from nano_rl.learn.rows.batch import Batch


class FirstLook:
    """Sees each batch of a step once, under the weights that the step began with."""

    def __init__(self, probe: Probe | None, fresh: Collection[str]) -> None:
        """`fresh` are the runs that these weights sampled, where others are among them."""
        self._probe, self._fresh = probe, frozenset(fresh)
        self._apart: dict[str, float] = {}
        self._gaps: list[Tensor] = []

    def see(self, batch: Batch, logprobs_BT: Tensor) -> None:
        if self._probe is not None:
            self._apart |= self._probe.apart(batch, logprobs_BT)
        rows = [place for place, run in enumerate(batch.run_ids) if run in self._fresh]
        if rows:
            gap_BT = (logprobs_BT[rows] - batch.behaviour_logprobs_BT[rows]).abs()
            self._gaps.append(gap_BT[batch.mask_BT[rows]].detach())

    @property
    def metrics(self) -> dict[str, float]:
        """`ratio_apart` (`probe.py`); of tokens that these weights sampled beside those of older ones,
        `mismatch_fresh`: |sampler - trainer|, mean; and the largest of each (`_max`), nats."""
        return {**self._apart, **mean_and_max("mismatch_fresh", self._gaps)}


def mean_and_max(name: str, gaps: list[Tensor]) -> dict[str, float]:
    """Of all the differences; nothing where there are none."""
    if not sum(gap.numel() for gap in gaps):
        return {}
    gap_N = torch.cat(gaps).double()
    return {name: gap_N.mean().item(), f"{name}_max": gap_N.max().item()}
