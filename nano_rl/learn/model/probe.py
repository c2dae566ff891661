"""The probe: a row of the step that is scored before its update and again after it.

Before, alone and as a plain row, whatever the rows beside it and the tree of the update: what the update's
own pass says of it has to be the same, else the trainer's ratio is not what it is taken for. After, by the
trainer and by what serves next, which tells the commonest silent failure of a training: a copy that was not
refreshed, an adapter that was not merged, a cache of a converted head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nano_rl.learn.model.logprob import plain_rows, token_logprobs
from nano_rl.learn.rows.batch import Batch, make_batches
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import to_samples

SAMPLED = 64
"""positions of the row from its first sampled token on; forward passes over it are cheap beside a step"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """One row, and what the trainer thought of it before the update."""

    batch: Batch
    """[1, T]"""
    before_N: Tensor
    """log-probs of the sampled tokens, nats, of the row alone"""

    @classmethod
    def of(cls, groups: Sequence[Group], model: nn.Module) -> Probe | None:
        """The start of the first row that has sampled tokens; None where there is none."""
        for run in (t for group in groups for t in group.trajectories if t.has_tokens):
            row = to_samples(run, 0.0, imitation=True)[0]
            if 1 not in row.mask:
                continue
            end = row.mask.index(1) + SAMPLED
            cut = {
                name: getattr(row, name)[:end]
                for name in ("ids", "mask", "logprobs", "versions", "turn_ids_T")
            }
            temperature = run.own_turns[0].completion.sampling.temperature or 1.0
            (batch,) = make_batches([replace(row, **cut, temperature=temperature)], max_tokens=end)
            with plain_rows(model):
                return cls(batch=batch, before_N=_score(model, batch))
        return None

    def apart(self, batch: Batch, logprobs_BT: Tensor) -> dict[str, float]:
        """`ratio_apart` and `ratio_apart_max`: |log-prob in a batch of the update - alone|, mean and largest,
        nats; nothing where the row is not in the batch."""
        own = self.batch.to(batch.ids_BT.device)
        length = own.ids_BT.shape[1]
        for place, run in enumerate(batch.run_ids):
            if run == own.run_ids[0] and torch.equal(batch.ids_BT[place, :length], own.ids_BT[0]):
                trained_N = batch.mask_BT[place, :length][own.mask_BT[0]].cpu()
                gap_N = (logprobs_BT[place, :length][own.mask_BT[0]].cpu() - self.before_N).abs()[trained_N]
                if gap_N.numel():
                    return {"ratio_apart": gap_N.mean().item(), "ratio_apart_max": gap_N.max().item()}
        return {}

    @property
    def places(self) -> list[int]:
        """Of the tokens that were sampled."""
        return self.batch.mask_BT[0].nonzero()[:, 0].tolist()

    def gap_N(self, served: Sequence[float]) -> Tensor:
        """[N] how far log-probs of the row, from its first sampled token on, are from those before."""
        return (self.before_N - self._sampled(served)).abs()

    def _sampled(self, served: Sequence[float]) -> Tensor:
        places = self.places
        return torch.tensor([served[place - places[0]] for place in places], dtype=self.before_N.dtype)

    def metrics(self, model: nn.Module, engine: Any) -> dict[str, float]:
        """`probe_mismatch` and `probe_mismatch_max`: |trainer - served| after the update, mean and largest,
        nats; `probe_shift`: by how much the update moved the trainer's log-probs of the row, in the mean.

        `engine` is the one that samples next.
        """
        after_N = _score(model, self.batch)
        temperature = self.batch.temperature_B[0].item()
        (served,) = engine.score(
            [tuple(self.batch.ids_BT[0].tolist())], temperature, first=self.places[0]
        )  # fmt: skip
        gap_N = (after_N - self._sampled(served)).abs()
        return {
            "probe_mismatch": gap_N.mean().item(),
            "probe_mismatch_max": gap_N.max().item(),
            "probe_shift": (after_N - self.before_N).abs().mean().item(),
        }


@torch.no_grad()
def _score(model: nn.Module, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    return token_logprobs(model, batch.to(device))[batch.mask_BT.to(device)].cpu()
