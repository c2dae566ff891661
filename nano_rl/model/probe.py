"""The probe: a row of the step that is scored again after the update, by the trainer and by what serves next.

It tells the commonest silent failure of a training, serving weights other than those that were trained: a
copy that was not refreshed, an adapter that was not merged, a cache of a converted head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.batch import Batch, make_batches
from nano_rl.group import Group
from nano_rl.model.logprob import token_logprobs
from nano_rl.sample import to_samples

SAMPLED = 64
"""positions of the row from its first sampled token on; forward passes over it are cheap beside a step"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """One row, and what the trainer thought of it before the update."""

    batch: Batch
    """[1, T]"""
    before_N: Tensor
    """log-probs of the sampled tokens, nats"""

    @classmethod
    def of(cls, groups: Sequence[Group], model: nn.Module) -> Probe | None:
        """The start of the first row that has sampled tokens; None where there is none."""
        for run in (t for group in groups for t in group.trajectories if t.has_tokens):
            row = to_samples(run, 0.0, imitation=True)[0]
            if 1 not in row.mask:
                continue
            end = row.mask.index(1) + SAMPLED
            cut = {name: getattr(row, name)[:end] for name in ("ids", "mask", "logprobs", "versions")}
            (batch,) = make_batches([replace(row, **cut)], max_tokens=end)
            return cls(batch=batch, before_N=_score(model, batch))
        return None

    def metrics(self, model: nn.Module, engine: Any) -> dict[str, float]:
        """`probe_mismatch` and `probe_mismatch_max`: |trainer - served| after the update, mean and largest,
        nats; `probe_shift`: by how much the update moved the trainer's log-probs of the row, in the mean.

        `engine` is the one that samples next.
        """
        after_N = _score(model, self.batch)
        places = self.batch.mask_BT[0].nonzero()[:, 0].tolist()
        (served,) = engine.score([tuple(self.batch.ids_BT[0].tolist())], first=places[0])
        served_N = torch.tensor([served[place - places[0]] for place in places], dtype=after_N.dtype)
        gap_N = (after_N - served_N).abs()
        return {
            "probe_mismatch": gap_N.mean().item(),
            "probe_mismatch_max": gap_N.max().item(),
            "probe_shift": (after_N - self.before_N).abs().mean().item(),
        }


@torch.no_grad()
def _score(model: nn.Module, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    return token_logprobs(model, batch.to(device))[batch.mask_BT.to(device)].cpu()
