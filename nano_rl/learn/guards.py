"""Guards: conditions that the metrics of every step must meet; a training stops with GuardTripped otherwise.

The probe is one row of a step. Before the update it is scored alone; the update's own pass, with other rows
beside it and shared prefixes, must give the same log-probs. After it the trainer and the sampler that serves
next must agree on it, and the sampler must show what the update changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import GuardConfig
from nano_rl.learn.groups import Group, TrainSample, to_samples
from nano_rl.learn.learner import with_weights
from nano_rl.learn.logprob import can_share, plain_rows, token_logprobs
from nano_rl.learn.loss import relative_gap
from nano_shared.errors import GuardTripped

StepMetrics = Mapping[str, float]


def check_step(
    metrics: StepMetrics, config: GuardConfig, *, earlier: Sequence[StepMetrics] = (), bfloat16: bool = False
) -> None:
    """Check the metrics of an update before it is applied; one that is absent is not checked.

    `update` is its index on these rollouts; `stale` is above 0 if the step has rows of older policies: then
    `mismatch_fresh` covers the rows of the present policy, and `mismatch_ahead` those rolled out ahead.
    `earlier` are the metrics of earlier steps, oldest first. With `bfloat16` the mean mismatch is checked
    instead of the maximum. Raises GuardTripped.
    """
    steps = (*earlier, metrics)
    last = steps[-config.patience :]
    _trip(
        metrics,
        _empty_mask(metrics)
        or _non_finite(metrics)
        or _first_ratio(metrics)
        or _apart(metrics, config, bfloat16)
        or _first_kl(metrics)
        or _mismatch(steps, config, bfloat16)
        or (_lasting(last) if len(last) == config.patience else None),
    )


def check_update(metrics: StepMetrics, config: GuardConfig, *, bfloat16: bool = False) -> None:
    """Check the metrics of the probe after an update, before its weights are saved or served. Raises
    GuardTripped."""
    _trip(metrics, _diverged(metrics) or _not_served(metrics, config, bfloat16))


def _trip(metrics: StepMetrics, problem: str | None) -> None:
    if problem:
        where = f"step {int(metrics['step'])}: " if "step" in metrics else ""
        raise GuardTripped(where + problem)


def _empty_mask(metrics: StepMetrics) -> str | None:
    if metrics.get("tokens", 1) > 0:
        return None
    return "the mask is empty: no sampled token would be trained; check that the rollouts carry token ids"


def _non_finite(metrics: StepMetrics) -> str | None:
    for name in ("loss", "grad_norm"):
        value = metrics.get(name, 0.0)
        if not math.isfinite(value):
            return f"{name} is {value}; lower the learning rate, or look at the rows of this step"
    return None


def _first_ratio(metrics: StepMetrics) -> str | None:
    deviation = metrics.get("ratio_deviation_max", 0.0)
    # written as "not equal" so that NaN trips too
    if metrics.get("update", 0) > 0 or deviation == 0:
        return None
    return (
        f"the trainer's ratio is {deviation:.3g} away from 1 on the first update, where it must be exactly 1:"
        " old and new log-probs come from different weights, inputs or modes"
    )


def _apart(metrics: StepMetrics, config: GuardConfig, bfloat16: bool) -> str | None:
    name, bound = _bound("ratio_apart", config, bfloat16)
    value = metrics.get(name, 0.0)
    if metrics.get("update", 0) > 0 or value <= bound:
        return None
    return (
        f"the trainer's log-probs of a row are {value:.3g} away ({name}) from those of the same row scored"
        f" alone before the update, more than {bound:g}: rows beside it, padding, dropout or shared prefixes"
        " change what the ratio and the gradient are made of"
    )


def _bound(name: str, config: GuardConfig, bfloat16: bool) -> tuple[str, float]:
    """The metric to check (the mean with bfloat16 weights, else the maximum), and its bound."""
    return (name if bfloat16 else f"{name}_max"), mismatch_bound(config, bfloat16)


def mismatch_bound(config: GuardConfig, bfloat16: bool) -> float:
    """Of |log-prob of sampler - of trainer|, nats: of the mean with bfloat16 weights, else of every token."""
    return config.mismatch_max or (0.05 if bfloat16 else 1e-4)


ENTROPY_MIN = 1e-3
"""mean entropy of the trained tokens, nats, below which the policy counts as collapsed"""
SHIFT_MAX = 5.0
"""largest mean |change| of a row's log-probs by one update, nats; a larger one means divergence"""


def _first_kl(metrics: StepMetrics) -> str | None:
    kl = metrics.get("kl_reference", 0.0)
    if metrics.get("step", 1) > 0 or metrics.get("update", 0) > 0 or abs(kl) <= 1e-6:
        return None
    return f"the KL to the reference is {kl:.3g} before any update, where it must be 0: the reference differs"


def _mismatch(steps: Sequence[StepMetrics], config: GuardConfig, bfloat16: bool) -> str | None:
    metrics = steps[-1]
    for kind, whose in MISMATCHES.items():
        name, bound = _bound(kind, config, bfloat16)
        value = metrics.get(name, 0.0)
        check = _young(steps) or "check weights, temperature, template and dtype on both sides"
        # it covers rows of older weights too; later updates keep the value of the first
        mixed = kind == "mismatch_relative" and metrics.get("stale", 0) > 0
        # written so that NaN trips too
        if not value <= bound and not mixed:
            return (
                f"sampler and trainer log-probs of {whose} differ by {value:.3g} ({name}), more than"
                f" {bound:g}: {check}"
            )
    return None


ARRIVED = 0.9
"""share of an update's gain, below which the sampler does not multiply by all of the adapter"""


def _young(steps: Sequence[StepMetrics]) -> str | None:
    """What is wrong if the sampler shows less than the last update gained; else, or if unmeasured, None."""
    shares = [step["adapter_arrives"] for step in steps if "adapter_arrives" in step]
    if not shares or shares[-1] >= ARRIVED:
        return None
    return (
        f"only {max(shares[-1], 0.0):.0%} of what the last update gained arrives in the sampler"
        " (adapter_arrives), which leaves a young adapter out or rounds it away, over a base that may be"
        " right: serve base and adapter apart, or train with dtype = float32"
    )


MISMATCHES = {
    "mismatch_relative": "fresh tokens",
    "mismatch_fresh": "fresh tokens beside older ones",
    "mismatch_ahead": "tokens that were rolled out ahead",
}
"""metric -> the tokens that it covers, each compared under the weights that sampled them"""


def _lasting(last: Sequence[StepMetrics]) -> str | None:
    """What is wrong if it was so in all of the last steps."""
    patience = len(last)
    if not any(step.get("all_dropped", 0.0) < 1 for step in last):
        return (
            f"no logged run of {patience} steps is near enough to the policy: each left by its age or by its"
            " importance weight (drift_logged says how far they are); give younger logs, add fresh"
            " rollouts (--fresh), or train fewer steps at a lower learning rate"
        )
    if not any(step.get("frac_truncated", 0.0) < 1 for step in last):
        return (
            f"every rollout of {patience} steps was cut off by a limit: raise the limits of the tasks"
            " (tokens, turns) or the policy's context, or warm it up with nano-rl sft so that it learns to"
            " finish"
        )
    if all(step.get("frac_unscored", 0.0) == 1 for step in last):
        return (
            f"no rollout of {patience} steps has a reward: policy, sandbox or grader fail;"
            " nano-coder log list shows how each run ended"
        )
    rewards = {step.get(name, math.nan) for step in last for name in ("reward_min", "reward_max")}
    if len(rewards) == 1 and not any(math.isnan(r) for r in rewards):
        return (
            f"every reward of {patience} steps is {rewards.pop():g}: the grader cannot tell runs apart;"
            " choose easier or harder tasks, or check the grader"
        )
    if all(step.get("frac_zero_std", 0.0) == 1 for step in last):
        return (
            f"all groups of {patience} steps are dead, each with equal rewards: choose easier or harder"
            " tasks, larger groups, or a higher temperature"
        )
    entropies = [step.get("entropy", math.inf) for step in last]
    if all(entropy < ENTROPY_MIN for entropy in entropies):
        return (
            f"the policy has collapsed: its entropy was under {ENTROPY_MIN:g} nats for {patience} steps"
            f" ({entropies[-1]:.3g} now); go on from an earlier state with a lower learning rate, a wider"
            " clip_high or a KL to the start (beta)"
        )
    return None


def _diverged(metrics: StepMetrics) -> str | None:
    shift = metrics.get("probe_shift", 0.0)
    if shift <= SHIFT_MAX:  # false for NaN
        return None
    rate = f" of {metrics['learning_rate']:g}" if "learning_rate" in metrics else ""
    return (
        f"one update moved the log-probs of a row by {shift:.3g} nats in the mean, more than"
        f" {SHIFT_MAX:g}: the learning rate{rate} diverges; lower it (the last saved state is kept)"
    )


def _not_served(metrics: StepMetrics, config: GuardConfig, bfloat16: bool) -> str | None:
    name, bound = _bound("probe_mismatch", config, bfloat16)
    gap = metrics.get(name, 0.0)
    if gap <= bound:
        return None
    cause = _young([metrics]) or "the sampler does not serve the weights that were trained"
    return (
        f"after the update the served log-probs of a probe are {gap:.3g} away from the trainer's ({name}),"
        f" more than {bound:g}: {cause}"
    )


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
    """Compares the log-probs of each batch that an update computed with the logged ones."""

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
    sampled, of the step's most expensive micro-batch alone, which bounds the cost."""
    batches = make_batches(samples, max_tokens=max_tokens, trees=can_share(model))
    if not batches:
        return {}
    device = next(model.parameters()).device
    batch = batches[0].to(device)
    with torch.no_grad(), with_weights(model, weights):
        gap_BT = relative_gap(token_logprobs(model, batch), batch.behaviour_logprobs_BT)
    return mean_and_max("mismatch_ahead", [gap_BT[batch.mask_BT].cpu()])
