"""Checks that sampler and trainer agree: log-probs of the same tokens from both, before and after an update.

The probe is one row of the step. Before the update it is scored alone, as a plain row; the update's own pass,
with other rows beside it and shared prefixes, must give the same log-probs, or the ratio is wrong. After the
update the trainer and the sampler that serves next must agree on it: they differ where a copy was not
refreshed, an adapter left out, or a converted head was cached. Of a batch of the step, the sampler must also
show what the update changed (`adapter_arrives`), which may be far less than the two differ by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from nano_rl.learn.loss import relative_gap
from nano_rl.learn.model.learner import with_weights
from nano_rl.learn.model.logprob import can_share, plain_rows, token_logprobs
from nano_rl.learn.rows.batch import Batch, make_batches
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample, to_samples

SAMPLED = 64
"""positions of the row from its first sampled token on, so that the passes over it stay cheap"""
UNCERTAIN = 0.25
"""standard error beyond which a share says nothing"""


class ScoreRow(Protocol):
    """The sampler's log-probs of `ids[first:]`: `Engine.score_decoding`."""

    def __call__(self, ids: tuple[int, ...], temperature: float, *, first: int) -> list[float]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probe:
    """One row, and the trainer's log-probs of it before the update."""

    batch: Batch
    """[1, T]"""
    before_N: Tensor
    """[N] log-probs of its sampled tokens, nats, scored alone"""
    trained: list[tuple[Batch, Tensor]] = field(default_factory=list)
    """at most one batch of the update that these weights sampled, with the trainer's log-probs before it"""

    @classmethod
    def of(cls, groups: Sequence[Group], model: nn.Module) -> Probe | None:
        """A probe from the start of the first row with sampled tokens; None if no run has any."""
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

    def compare(self, batch: Batch, logprobs_BT: Tensor) -> dict[str, float]:
        """`ratio_apart` and `ratio_apart_max`: relative gap of the log-probs in a batch of the update and
        alone, mean and largest; empty if the row is not in the batch."""
        own = self.batch.to(batch.ids_BT.device)
        length = own.ids_BT.shape[1]
        for place, run in enumerate(batch.run_ids):
            if run == own.run_ids[0] and torch.equal(batch.ids_BT[place, :length], own.ids_BT[0]):
                trained_N = batch.mask_BT[place, :length][own.mask_BT[0]].cpu()
                now_N = logprobs_BT[place, :length][own.mask_BT[0]].cpu()
                gap_N = relative_gap(now_N, self.before_N)[trained_N]
                if gap_N.numel():
                    return {"ratio_apart": gap_N.mean().item(), "ratio_apart_max": gap_N.max().item()}
        return {}

    @property
    def places(self) -> list[int]:
        """Positions of the sampled tokens."""
        return self.batch.mask_BT[0].nonzero()[:, 0].tolist()

    def gap_N(self, served: Sequence[float]) -> Tensor:
        """[N] relative gap of the log-probs before the update and `served`, which starts at the first sampled
        token."""
        return relative_gap(self.before_N, self._sampled(served))

    def _sampled(self, served: Sequence[float]) -> Tensor:
        places = self.places
        return torch.tensor([served[place - places[0]] for place in places], dtype=self.before_N.dtype)

    def metrics(self, model: nn.Module, sampler: ScoreRow) -> dict[str, float]:
        """`probe_mismatch` and `probe_mismatch_max`: relative gap of trainer and sampler after the update,
        mean and largest; `probe_shift`: mean |change| of the trainer's log-probs by the update, nats."""
        after_N = _score(model, self.batch)
        served = sampler(
            tuple(self.batch.ids_BT[0].tolist()), self.batch.temperature_B[0].item(), first=self.places[0]
        )
        gap_N = relative_gap(after_N, self._sampled(served))
        return {
            "probe_mismatch": gap_N.mean().item(),
            "probe_mismatch_max": gap_N.max().item(),
            "probe_shift": (after_N - self.before_N).abs().mean().item(),
        }

    def arrives(self, model: nn.Module, sampler: ScoreRow) -> dict[str, float]:
        """`adapter_arrives`: the share of what the update gained that the sampler shows.

            sum_i A_i (s'_i - s_i) / sum_i A_i (t'_i - t_i)

        over the tokens i of one micro-batch that the weights before the update sampled, with advantages A,
        and log-probs in nats of the sampler (s) and the trainer (t) before and after (') the update; s are
        those that were sampled with. 1 if all of it arrives. Rounding moves both by more than one update
        does, at random: empty where the standard error of the share is above `UNCERTAIN`.
        """
        if not self.trained:
            return {}
        batch, before_BT = self.trained[0]
        after_BT = batch.behaviour_logprobs_BT.clone()
        for row, length in enumerate(batch.attention_BT.sum(1).tolist()):
            first = int(batch.mask_BT[row].int().argmax())
            ids = tuple(batch.ids_BT[row, :length].tolist())
            scores = sampler(ids, batch.temperature_B[row].item(), first=first)
            after_BT[row, first:length] = torch.tensor(scores).to(after_BT)
        shown_BT = batch.advantages_BT * (after_BT - batch.behaviour_logprobs_BT)
        with torch.no_grad():
            gained_BT = batch.advantages_BT * (token_logprobs(model, batch) - before_BT)
        shown_N, gained_N = (part[batch.mask_BT].double() for part in (shown_BT, gained_BT))
        gained = gained_N.sum().item()
        error = (shown_N - gained_N).square().sum().sqrt().item()
        return {"adapter_arrives": shown_N.sum().item() / gained} if error < UNCERTAIN * abs(gained) else {}


@torch.no_grad()
def _score(model: nn.Module, batch: Batch) -> Tensor:
    device = next(model.parameters()).device
    return token_logprobs(model, batch.to(device))[batch.mask_BT.to(device)].cpu()


class LogprobMonitor:
    """Compares the log-probs of each batch, under the weights at the start of the step, with the logged ones.

    It costs no pass of its own: it receives those of the update.
    """

    def __init__(self, probe: Probe | None, fresh: Set[str] | None) -> None:
        """`fresh` are the runs that these weights sampled; None if all runs are theirs."""
        self._probe, self._fresh = probe, fresh
        self._probe_metrics: dict[str, float] = {}
        self._gaps: list[Tensor] = []

    def observe(self, batch: Batch, logprobs_BT: Tensor) -> None:
        if self._probe is not None:
            self._probe_metrics |= self._probe.compare(batch, logprobs_BT)
            if self._fresh is None or self._fresh >= set(batch.run_ids):
                self._probe.trained[:] = self._probe.trained or [(batch.to(logprobs_BT.device), logprobs_BT)]
        rows = [place for place, run in enumerate(batch.run_ids) if self._fresh and run in self._fresh]
        if rows:
            batch = batch.to(logprobs_BT.device)
            gap_BT = relative_gap(logprobs_BT[rows], batch.behaviour_logprobs_BT[rows])
            self._gaps.append(gap_BT[batch.mask_BT[rows]].detach())

    @property
    def metrics(self) -> dict[str, float]:
        """`ratio_apart` of the probe, and of the `fresh` runs `mismatch_fresh`, the relative gap of sampler
        and trainer; the mean of each and the largest (`_max`)."""
        return {**self._probe_metrics, **mean_and_max("mismatch_fresh", self._gaps)}


def mean_and_max(name: str, gaps: list[Tensor]) -> dict[str, float]:
    """`name` and `name_max`: mean and maximum over all tensors; empty if they hold no numbers."""
    if not sum(gap.numel() for gap in gaps):
        return {}
    gap_N = torch.cat(gaps).double()
    return {name: gap_N.mean().item(), f"{name}_max": gap_N.max().item()}


def mismatch_ahead(
    model: nn.Module, samples: Sequence[TrainSample], weights: Mapping[str, Tensor], *, max_tokens: int
) -> dict[str, float]:
    """`mismatch_ahead` and `mismatch_ahead_max`: relative gap of sampler and trainer with the weights that
    sampled, mean and largest.

    Of the step's most expensive micro-batch alone, in one pass without gradient, which bounds the cost.
    """
    batches = make_batches(samples, max_tokens=max_tokens, trees=can_share(model))
    if not batches:
        return {}
    device = next(model.parameters()).device
    batch = batches[0].to(device)
    with torch.no_grad(), with_weights(model, weights):
        gap_BT = relative_gap(token_logprobs(model, batch), batch.behaviour_logprobs_BT)
    return mean_and_max("mismatch_ahead", [gap_BT[batch.mask_BT].cpu()])
