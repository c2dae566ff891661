"""One step of the policy: groups with a signal -> samples -> minibatches -> guarded updates of the weights.

    L = L_RL + beta * L_KL + sum over terms of weight * L_term

Each further term (imitation, preferences) is a mean over its own tokens or pairs. A step makes
`updates_per_step` passes over its rollouts, each in `minibatches` parts of whole groups; each part is one
update with its own denominators. On the first update the ratio is exactly 1.

Logged runs come from older policies; their tokens get importance weights w = p(token) / behaviour(token). The
effective sample size, (sum w)^2 / (n sum w^2) over n tokens, is the share of them that carries the estimate
(Kish 1965). The runs with the largest drift, the mean |log w|, are dropped until it reaches the bound, and
runs above the bound on drift in any case: where most weights are near 0 and alike, the ESS does not show it.
That biases the gradient toward what the policy still does; the metrics say how much was dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nano_rl.learn.advantages import CreditedGroup, RolloutBatch, group_samples, turn_rewards
from nano_rl.learn.batch import Batch, enough_tokens, make_batches
from nano_rl.learn.config import UpdateConfig
from nano_rl.learn.groups import Group, StepRow, TrainSample, recent
from nano_rl.learn.guards import LogprobMonitor, Probe, check_step, mismatch_ahead
from nano_rl.learn.learner import BatchLoss, Learner, LossPart, Reference, Stateful
from nano_rl.learn.logprob import can_share, score_tokens, token_logprobs
from nano_rl.learn.loss import EXTREMA, clamped_exp, policy_loss, token_weights
from nano_rl.learn.objectives import Objective
from nano_shared.extension_points import Extensions

Metrics = dict[str, float]


class TermPart(Protocol):
    """The part of a loss term that belongs to one minibatch."""

    batches: Sequence[Batch]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        """The batch's share of the unweighted loss; metrics `loss` and `tokens` add up over batches."""

    def metrics(self) -> Metrics:
        """The term's own metrics, after `loss` was called for every batch."""


class LossTerm(Protocol):
    """An additional loss: imitation, preferences."""

    name: str
    """`loss_NAME` and `share_NAME` are its metrics"""
    weight: float

    @property
    def run_ids(self) -> Sequence[str]:
        """Runs that it learns from besides those of the steps."""

    def draw(self, step: int, groups: Sequence[Group]) -> Sequence[Any]:
        """The term's items (samples, pairs) of one step; may be empty."""

    def part(self, drawn: Sequence[Any], index: int, count: int, *, trees: bool) -> TermPart:
        """The part of the drawn items that belongs to minibatch `index` of `count`."""


class Critic(Stateful, Protocol):
    """Credits tokens by what it expected: an extension of `nano.critics`, made of policy and settings."""

    def group_rows(
        self, groups: Sequence[Group], turn_rewards: Sequence[Sequence[Sequence[float] | None]]
    ) -> list[list[StepRow]]:
        """[groups] the rows of each with advantages, given the reward of each turn; rollouts without one are
        left out."""

    def update(self, critic_rows: Sequence[StepRow], *, ends_step: bool) -> Metrics:
        """One optimizer step on these rows. Raises GuardTripped."""

    def explained(self, rows: Sequence[StepRow]) -> Metrics:
        """Metrics of what it expected and what came."""


CRITICS: Extensions[Callable[[nn.Module, UpdateConfig], Critic]] = Extensions("nano.critics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    batches: list[Batch]
    """rollouts, for the policy's objective"""
    terms: list[tuple[LossTerm, TermPart]]
    """the terms that have items in this minibatch"""
    rows: list[StepRow]
    """the same rollouts, for the critic"""

    def with_old(self, learner: Learner) -> Minibatch:
        scored = zip(self.batches, learner.logprobs(self.batches), strict=True)
        return replace(self, batches=[batch.with_old(logprobs_BT) for batch, logprobs_BT in scored])


OnLogprobs = Callable[[Batch, Tensor], None]
"""receives each batch with the log-probs that an update computed of it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """`BatchLoss`: the policy's objective on a micro-batch of rollouts."""

    objective: Objective
    on_logprobs: OnLogprobs | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        scores = score_tokens(model, batch, entropy_gradient=self.objective.entropy_bonus > 0)
        if self.on_logprobs is not None:
            self.on_logprobs(batch, scores.logprobs_BT.detach())
        return policy_loss(scores.logprobs_BT, batch, self.objective, entropy_BT=scores.entropy_BT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TermLoss:
    """`BatchLoss`: a further term of the loss on a micro-batch, weighted."""

    name: str
    weight: float
    loss: BatchLoss

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, metrics = self.loss(model, batch)
        value = self.weight * metrics["loss"]
        return self.weight * loss, {"loss": value, f"loss_{self.name}": value}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    groups: list[list[StepRow]]
    """[groups] the rows of each; no group is empty"""
    drawn: list[Sequence[Any]]
    """[terms] the items of each further loss term"""
    metrics: Metrics
    """`stale_dropped`, and of logged runs those of `DriftSelection`"""
    has_credit: bool
    """False if no group had a signal and no term an item"""
    behaviour_weights: Mapping[str, Tensor] | None = None

    @property
    def samples(self) -> list[TrainSample]:
        return [row.sample for rows in self.groups for row in rows]

    @property
    def empty(self) -> bool:
        return not (self.groups or any(map(len, self.drawn)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    learner: Learner
    config: UpdateConfig
    reference: Reference | None = None
    """given where `beta` is above 0, or the surrogate reads it"""
    critic: Critic | None = None
    terms: Sequence[LossTerm] = ()

    def credit(self, batch: RolloutBatch, version: int) -> StepRows:
        """The token rows of the groups with a signal, with their credit or that of the critic; without stale
        tokens, and without logged runs beyond the bounds on ESS and drift."""
        config, objective = self.config, self.config.objective
        live = [c for c in batch.credited if c.has_signal]
        drawn = [term.draw(self.learner.step, batch.groups) for term in self.terms]
        rows = [
            [replace(row, sample=capped(row.sample, batch.logged)) for row in of_group]
            for of_group in self._rows(live)
        ]
        before = _action_tokens(rows)
        rows = _kept(rows, lambda sample: recent(sample, version, objective.max_staleness))
        metrics = {"stale_dropped": float(before - _action_tokens(rows))}
        old = {run for run, sampled_at in batch.logged.items() if sampled_at != version}
        if old:
            samples = [row.sample for of_group in rows for row in of_group]
            selection = score_and_select(self.learner.model, samples, old, max_tokens=config.max_tokens)
            if selection is not None:
                rows = _kept(rows, lambda sample: [sample] * (sample.run_id not in selection.dropped))
                metrics |= selection.metrics
        return StepRows(
            groups=rows, drawn=drawn, metrics=metrics, has_credit=bool(live) or any(map(len, drawn)),
            behaviour_weights=batch.behaviour_weights,
        )  # fmt: skip

    def update(
        self, rows: StepRows, values: Mapping[str, float], probe: Probe | None, version: int,
        history: Sequence[Metrics] = (),
    ) -> Metrics:  # fmt: skip
        """All updates of one step. Returns its metrics; no update is made where there is nothing to learn.
        Raises GuardTripped. `values` are the step's metrics so far and `history` those of earlier steps, for
        the guards; `probe` is a row of the step that was scored by itself."""
        config, model, metrics = self.config, self.learner.model, dict(rows.metrics)
        if rows.empty:
            added = {**metrics, "all_dropped": 1.0} if rows.has_credit else {}
            check_step({**values, **added}, config.guards, earlier=history)
            self.learner.step += 1
            return {"skipped": 1.0, **added}
        if self.critic is not None:
            # the baseline comes from elsewhere, so groups of equal rewards have advantages too
            values = {**values, "frac_zero_std": 0.0}
        samples, trees = rows.samples, can_share(model)
        metrics["stale"] = _stale(samples, version)
        if rows.behaviour_weights is not None:
            metrics |= mismatch_ahead(model, samples, rows.behaviour_weights, max_tokens=config.max_tokens)
        fresh = {s.run_id for s in samples if min(s.versions) == version} if metrics["stale"] else None
        monitor = LogprobMonitor(probe, fresh)

        def guard(update: int, learned: Metrics) -> None:
            judged = {**values, **metrics, **learned, **monitor.metrics, "update": float(update)}
            if not samples:
                judged.pop("tokens", None)  # those of the terms are counted by themselves
            check_step(judged, config.guards, earlier=history, bfloat16=config.dtype == "bfloat16")

        learned = self._passes(self._minibatches(rows, trees=trees), guard, monitor)
        if self.critic is not None:
            learned |= self.critic.explained([row for of_group in rows.groups for row in of_group])
        return {**learned, **metrics, "tree_fallback": float(not trees), "skipped": 0.0}

    def _rows(self, live: Sequence[CreditedGroup]) -> list[list[StepRow]]:
        """[groups] the rows of each, with its credit, or that of the critic."""
        if self.critic is not None:
            groups, objective = [c.group for c in live], self.config.objective.terms
            return self.critic.group_rows(groups, [turn_rewards(group, objective) for group in groups])
        return [
            [StepRow(sample=sample) for sample in group_samples(c.group, advantages_G=c.credit)] for c in live
        ]

    def _minibatches(self, rows: StepRows, *, trees: bool) -> list[Minibatch]:
        """Whole groups distributed over at most `minibatches` parts in a seeded order; no part is empty."""
        config, objective = self.config, self.config.objective.terms
        groups = list(rows.groups)
        enough = enough_tokens(next(self.learner.model.parameters()).device, config.max_tokens)
        count = max(1, min(config.minibatches, len(groups)))
        if count > 1:
            Random(f"minibatches {config.seed} {self.learner.step}").shuffle(groups)
        minibatches = []
        for part in range(count):
            chosen = [row for of_group in groups[part::count] for row in of_group]
            samples = [row.sample for row in chosen]
            weights = token_weights(samples, objective.aggregation, constant_length=objective.constant_length)
            batches = make_batches(
                samples, max_tokens=config.max_tokens, weights=weights, trees=trees, enough=enough
            )
            drawn = [pair for pair in zip(self.terms, rows.drawn, strict=True) if len(pair[1])]
            terms = [(term, term.part(items, part, count, trees=trees)) for term, items in drawn]
            batches = batches if self.reference is None else self.reference.score(batches)
            minibatches.append(Minibatch(batches=batches, terms=terms, rows=chosen))
        return minibatches

    def _passes(
        self, minibatches: Sequence[Minibatch], guard: Callable[[int, Metrics], None], monitor: LogprobMonitor
    ) -> Metrics:
        """Every pass over the minibatches; each update passes the guards before it is applied."""
        learner, objective, critic = self.learner, self.config.objective.terms, self.critic
        order = _order(len(minibatches), self.config, learner.step)
        later = {index: minibatches[index].with_old(learner) for index in sorted(set(order[1:]))}
        for batch in (b for index, part in later.items() if index != order[0] for b in part.batches):
            assert batch.old_logprobs_BT is not None
            monitor.observe(batch, batch.old_logprobs_BT)
        learned = []
        for update, index in enumerate(order):
            # the first update needs no old log-probs: they would come from the same weights
            minibatch = minibatches[index] if update == 0 else later[index]
            ends_step = update == len(order) - 1
            loss = PolicyLoss(objective=objective, on_logprobs=monitor.observe if update == 0 else None)
            parts: list[LossPart] = [(batch, loss) for batch in minibatch.batches]
            for term, part in minibatch.terms:
                weighted = TermLoss(name=term.name, weight=term.weight, loss=part.loss)
                parts += [(batch, weighted) for batch in part.batches]
            metrics = learner.update_parts(parts, partial(guard, update), ends_step=ends_step)
            if self.terms:
                metrics |= _shares(metrics, minibatch, self.terms, objective)
            if critic is not None and minibatch.rows:
                metrics |= critic.update(minibatch.rows, ends_step=ends_step)
            learned.append(metrics)
        return {**_over_updates(learned, passes=self.config.updates_per_step), **monitor.metrics}


def _shares(
    metrics: Metrics, minibatch: Minibatch, terms: Sequence[LossTerm], objective: Objective
) -> Metrics:
    sums = {term.name: metrics.get(f"loss_{term.name}", 0.0) for term in terms}
    kl = objective.beta * metrics.get("kl_reference", 0.0) if objective.kl_in == "loss" else 0.0
    losses = {"policy": metrics["loss"] - sum(sums.values()) - kl, "kl": kl, **sums}
    whole = sum(map(abs, losses.values()))
    own = {name: value for _, part in minibatch.terms for name, value in part.metrics().items()}
    return {
        **{f"loss_{name}": value for name, value in losses.items()},
        **{f"share_{name}": abs(value) / whole if whole else 0.0 for name, value in losses.items()},
        **own,
    }


def _kept(
    groups: Sequence[Sequence[StepRow]], keep: Callable[[TrainSample], Sequence[TrainSample]]
) -> list[list[StepRow]]:
    """The rows whose samples are kept, in groups that have any."""
    kept = [[replace(row, sample=s) for row in rows for s in keep(row.sample)] for rows in groups]
    return [rows for rows in kept if rows]


def _action_tokens(groups: Sequence[Sequence[StepRow]]) -> int:
    return sum(row.sample.num_action_tokens for rows in groups for row in rows)


def _order(count: int, config: UpdateConfig, step: int) -> list[int]:
    """The index of the minibatch of each update: all of them in each pass, shuffled by seed from the
    second."""
    order = list(range(count))
    for later in range(1, config.updates_per_step):
        again = list(range(count))
        Random(f"pass {config.seed} {step} {later}").shuffle(again)
        order += again
    return order


def _over_updates(rows: Sequence[dict[str, float]], *, passes: int) -> dict[str, float]:
    """The metrics of a step: means over its updates, extrema of `_max` and `_min`, token counts of one
    pass."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if bound := EXTREMA.get(name[-4:]):
            merged[name] = reduce(bound, values)
        elif name in ("tokens", "sft_tokens", "preference_pairs"):
            merged[name] = sum(values) / passes
        else:
            merged[name] = sum(values) / len(values)
    return {**merged, "updates": float(len(rows))}


def _stale(samples: Sequence[TrainSample], version: int) -> float:
    tokens = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    return sum(v != version for v in tokens) / max(1, len(tokens))


MIN_ESS, MAX_DRIFT = 0.5, 0.5
"""bounds on the effective sample size of the logged tokens of a step, as a share of them, and on the mean
|log importance weight| of a stale run, nats per token"""


def capped(sample: TrainSample, policy_version: Mapping[str, int]) -> TrainSample:
    """The sample with token versions of at most the policy version of its run, where that is given: the turns
    of a run from another training may name larger ones."""
    if (most := policy_version.get(sample.run_id)) is None:
        return sample
    return replace(sample, versions=tuple(min(version, most) for version in sample.versions))


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSelection:
    dropped: frozenset[str]
    ess_before: float
    """of the tokens of all logged runs"""
    drift: float
    """mean |log weight| over the logged runs, nats per token"""
    ess: float
    """of the remaining logged tokens; 1 if none remain"""

    @property
    def metrics(self) -> dict[str, float]:
        """`ess_logged` (all logged tokens), `ess_kept` (remaining ones), `weight_dropped` (number of dropped
        runs) and `drift_logged`."""
        return {
            "ess_logged": self.ess_before,
            "ess_kept": self.ess,
            "weight_dropped": float(len(self.dropped)),
            "drift_logged": self.drift,
        }


def score_and_select(
    model: nn.Module, samples: Sequence[TrainSample], logged: Collection[str], *, max_tokens: int
) -> DriftSelection | None:
    """Score the rows of logged runs with the current weights and apply `select_by_drift`; None without
    any."""
    rows = [s for s in samples if s.run_id in logged and s.num_action_tokens]
    if not rows:
        return None
    mismatch_of: dict[str, list[Tensor]] = defaultdict(list)
    with torch.no_grad():
        for batch in make_batches(rows, max_tokens=max_tokens, trees=can_share(model)):
            logprobs_BT = token_logprobs(model, batch).to(batch.ids_BT.device)
            mismatch_BT = (logprobs_BT - batch.behaviour_logprobs_BT).double()
            for run, values_T, mask_T in zip(batch.run_ids, mismatch_BT, batch.mask_BT, strict=True):
                mismatch_of[run].append(values_T[mask_T].cpu())
    return select_by_drift({run: torch.cat(parts) for run, parts in mismatch_of.items()}, MIN_ESS, MAX_DRIFT)


def select_by_drift(
    mismatch_of: Mapping[str, Tensor], bound: float, drift: float | None = None
) -> DriftSelection:
    """Keep as many runs as possible, in ascending order of drift, with an ESS of at least `bound` together
    and a drift of at most `drift` each. `mismatch_of` maps each run to [N] policy - behaviour log-probs,
    nats."""
    drifts = {run: float(values_N.abs().mean()) for run, values_N in mismatch_of.items()}
    ascending = sorted(drifts, key=lambda run: (drifts[run], run))
    allowed = sum(drift is None or value <= drift for value in drifts.values())
    weights = [clamped_exp(mismatch_of[run].double()) for run in ascending]
    count = torch.tensor([len(w) for w in weights], dtype=torch.float64).cumsum(0)
    total = torch.stack([w.sum() for w in weights]).cumsum(0)
    squared = torch.stack([w.square().sum() for w in weights]).cumsum(0)
    ess = (total.square() / (count * squared)).tolist()
    kept = max((place for place, value in enumerate(ess[:allowed], start=1) if value >= bound), default=0)
    return DriftSelection(
        dropped=frozenset(ascending[kept:]), ess_before=ess[-1], drift=sum(drifts.values()) / len(drifts),
        ess=ess[kept - 1] if kept else 1.0,
    )  # fmt: skip
