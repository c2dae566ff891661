"""One step of the policy: groups with a signal -> samples -> minibatches -> guarded updates of the weights.

    L = L_RL + beta * L_KL + sum over terms of weight * L_term

L_RL and L_KL are means over the trained tokens of the rollouts. Each further term (imitation, preferences) is
a mean over its own tokens or pairs, so that the size of one part does not change the weight of another.

A step makes `updates_per_step` passes over its rollouts, each in `minibatches` parts of whole groups; each
part is one update with its own denominators. The trainer's old log-probs are computed once, before the first
update; on the first update the ratio is exactly 1. Stale tokens and drifted runs are dropped first
(`step_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nano_rl.learn.advantage import CreditedGroup, RewardParts, RunningBaselines, credit_group
from nano_rl.learn.config import ObjectiveConfig, UpdateConfig
from nano_rl.learn.guards import check_step
from nano_rl.learn.mismatch import LogprobMonitor, Probe, mismatch_ahead
from nano_rl.learn.model.critic import Critic, CriticRow, explained_variance
from nano_rl.learn.model.learner import BatchLoss, Guard, Learner, LossPart, Reference
from nano_rl.learn.model.logprob import TokenScores, can_share, loss_and_scores, token_logprobs
from nano_rl.learn.objectives.loss import EXTREMA, policy_loss, token_weights
from nano_rl.learn.rows.batch import Batch, enough_tokens, make_batches
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample
from nano_rl.learn.step_rows import StepRows, score_and_select

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

    def draw(self, step: int, groups: Sequence[Group]) -> Sequence[Any]:
        """The term's items (samples, pairs) of one step; may be empty."""

    def part(self, drawn: Sequence[Any], index: int, count: int, *, trees: bool) -> TermPart:
        """The part of the drawn items that belongs to minibatch `index` of `count`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The data of one update."""

    batches: list[Batch]
    """rollouts, for the policy's objective"""
    terms: list[tuple[LossTerm, TermPart]]
    """the terms that have items in this minibatch"""
    critic_rows: list[CriticRow]
    """rollouts, for the critic; empty without a critic"""

    def with_old(self, model: nn.Module) -> Minibatch:
        """The same minibatch with the log-probs of the current weights as old log-probs."""
        with torch.no_grad():
            return replace(self, batches=[b.with_old(token_logprobs(model, b)) for b in self.batches])


OnLogprobs = Callable[[Batch, Tensor], None]
"""receives each batch with the log-probs that an update computed of it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """`BatchLoss`: the policy's objective on a micro-batch of rollouts."""

    objective: ObjectiveConfig
    on_logprobs: OnLogprobs | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        return loss_and_scores(
            model, batch, partial(_policy_loss, batch, self.objective, self.on_logprobs),
            separable=self.objective.separable, entropy_gradient=self.objective.entropy_bonus > 0,
        )  # fmt: skip


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


def update_minibatch(
    learner: Learner,
    minibatch: Minibatch,
    objective: ObjectiveConfig,
    guard: Guard,
    *,
    terms: Sequence[LossTerm] = (),
    ends_step: bool,
    on_logprobs: OnLogprobs | None = None,
) -> Metrics:
    """One update; returns its metrics.

    With `terms` also the weighted parts of the loss (`loss_policy`, `loss_kl`, `loss_NAME`), the share of
    each in the sum of their magnitudes (`share_*`), and the terms' own metrics.
    """
    reinforce = PolicyLoss(objective=objective, on_logprobs=on_logprobs)
    parts: list[LossPart] = [(batch, reinforce) for batch in minibatch.batches]
    for term, part in minibatch.terms:
        weighted = TermLoss(name=term.name, weight=term.weight, loss=part.loss)
        parts += [(batch, weighted) for batch in part.batches]
    metrics = learner.update_parts(parts, guard, ends_step=ends_step)
    if not terms:
        return metrics
    sums = {term.name: metrics.get(f"loss_{term.name}", 0.0) for term in terms}
    kl = objective.beta * metrics.get("kl_reference", 0.0) if objective.kl_in == "loss" else 0.0
    losses = {"policy": metrics["loss"] - sum(sums.values()) - kl, "kl": kl, **sums}
    whole = sum(map(abs, losses.values()))
    own = {name: value for _, part in minibatch.terms for name, value in part.metrics().items()}
    return {
        **metrics,
        **{f"loss_{name}": value for name, value in losses.items()},
        **{f"share_{name}": abs(value) / whole if whole else 0.0 for name, value in losses.items()},
        **own,
    }


def _policy_loss(
    whole: Batch,
    objective: ObjectiveConfig,
    on_logprobs: OnLogprobs | None,
    scores: TokenScores,
    batch: Batch,
) -> tuple[Tensor, Metrics]:
    # also called with slices of the batch, while the head's gradient is computed
    if on_logprobs is not None and batch is whole:
        on_logprobs(batch, scores.logprobs_BT.detach())
    return policy_loss(
        scores.logprobs_BT, batch, objective, entropy_BT=scores.entropy_BT, measured=batch is whole
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """The learner of a training with everything that its updates use."""

    learner: Learner
    config: UpdateConfig
    reward: RewardParts | None = None
    """the parts of a composed reward, for `normalise` = each"""
    reference: Reference | None = None
    """given where `beta` is above 0"""
    critic: Critic | None = None
    terms: Sequence[LossTerm] = ()
    """additional losses"""

    def learn(
        self,
        credited: Sequence[CreditedGroup],
        values: Mapping[str, float],
        *,
        version: int,
        history: Sequence[Metrics] = (),
        logged: Mapping[str, int] | None = None,
        baselines: RunningBaselines | None = None,
        probe: Probe | None = None,
        behaviour_weights: Mapping[str, Tensor] | None = None,
    ) -> Metrics:
        """All updates of one step. Returns its metrics; no update is made where there is nothing to learn.

        `credited` are the groups of the step, also those without a signal. `values` are the step's metrics so
        far and `history` those of earlier steps, for the guards. `logged` maps the step's logged runs to the
        policy versions that sampled them. `baselines` are needed for a baseline over time. `probe` is a row
        of the step that was scored by itself. `behaviour_weights` are the weights that sampled the step, if
        it was rolled out ahead by an older policy.

        Metrics added to those of the objective: `updates`, `stale` (share of tokens from older policies),
        `stale_dropped` (tokens), `tree_fallback` (1 if the model runs on independent rows), `skipped`; for
        logged runs those of `DriftSelection`, and `all_dropped` if none was kept; those of `LogprobMonitor`;
        with a critic `value_*`; with terms those of `update_minibatch`. Raises GuardTripped.
        """
        config, objective, logged = self.config, self.config.objective, logged or {}
        groups, live = [c.group for c in credited], [c for c in credited if c.has_signal]
        if config.shuffle_rewards:
            # imitation is part of the control: the successes that it takes must be shuffled too
            groups = shuffled([c.group for c in live], Random(f"shuffle {config.seed} {self.learner.step}"))
            live = [credit_group(group, objective, self.reward) for group in groups]
        drawn = [term.draw(self.learner.step, groups) for term in self.terms]
        if not (live or any(map(len, drawn))):
            return self._skip(values, history, {})
        rows = self._rows(live, baselines)
        if self.critic is not None or objective.over_time:
            # the baseline comes from elsewhere, so groups of equal rewards have advantages too
            values = {**values, "frac_zero_std": 0.0}
        trees = can_share(self.learner.model)
        rows, added = self._drop_stale(rows.cap_versions(logged), logged, version, trees=trees)
        if not (rows.samples or any(map(len, drawn))):
            return self._skip(values, history, {**added, "all_dropped": 1.0})
        added = {**added, "stale": _stale(rows.samples, version)}
        if behaviour_weights is not None:
            added |= mismatch_ahead(
                self.learner.model, rows.samples, behaviour_weights, max_tokens=config.max_tokens
            )
        fresh = {s.run_id for s in rows.samples if min(s.versions) == version} if added["stale"] else None
        learned = self._update(
            self._minibatches(rows, drawn, trees=trees), {**values, **added}, history,
            counts_tokens=bool(rows.samples), monitor=LogprobMonitor(probe, fresh),
        )  # fmt: skip
        if self.critic is not None:
            learned |= explained_variance(rows.critic_rows)
        return {**learned, **added, "tree_fallback": float(not trees), "skipped": 0.0}

    def _skip(self, values: Mapping[str, float], history: Sequence[Metrics], added: Metrics) -> Metrics:
        """Count a step without an update, after its guards. Raises GuardTripped."""
        check_step({**values, **added}, self.config.guards, earlier=history)
        self.learner.step += 1
        return {"skipped": 1.0, **added}

    def _rows(self, live: Sequence[CreditedGroup], baselines: RunningBaselines | None) -> StepRows:
        """The samples of the groups with a signal: with their credit, or that of the critic or
        `baselines`."""
        groups, objective = [c.group for c in live], self.config.objective
        if self.critic is not None:
            return StepRows.valued(groups, objective, self.critic)
        if objective.over_time:
            return StepRows.compared(groups, (baselines or RunningBaselines()).credit(groups, objective))
        return StepRows.compared(groups, [c.credit for c in live if c.credit is not None])

    def _drop_stale(
        self, rows: StepRows, logged: Mapping[str, int], version: int, *, trees: bool
    ) -> tuple[StepRows, Metrics]:
        """Drop stale tokens, and logged runs beyond the bounds on ESS and drift. Returns the remaining rows
        and the metrics of what was dropped."""
        rows, dropped = rows.drop_stale(version, self.config.objective.max_staleness)
        metrics, bounds = {"stale_dropped": float(dropped)}, self.config.logs
        old = {run for run, sampled_at in logged.items() if sampled_at != version}
        if not old or (bounds.min_ess == 0 and bounds.max_drift is None):
            return rows, metrics
        selection = score_and_select(
            self.learner.model, rows.samples, old, bounds.min_ess, drift=bounds.max_drift,
            max_tokens=self.config.max_tokens, trees=trees,
        )  # fmt: skip
        if selection is None:
            return rows, metrics
        return rows.drop_runs(selection.dropped), metrics | selection.metrics

    def _minibatches(self, rows: StepRows, drawn: Sequence[Sequence[Any]], *, trees: bool) -> list[Minibatch]:
        """Whole groups distributed over at most `minibatches` parts in a seeded order; no part is empty."""
        config, objective = self.config, self.config.objective
        groups = list(range(len(rows.samples_of)))
        enough = enough_tokens(next(self.learner.model.parameters()).device, config.max_tokens)
        count = max(1, min(config.minibatches, len(groups)))
        if count > 1:
            Random(f"minibatches {config.seed} {self.learner.step}").shuffle(groups)
        minibatches = []
        for part in range(count):
            chosen = groups[part::count]
            samples = [s for g in chosen for s in rows.samples_of[g]]
            weights = token_weights(samples, objective.aggregation, constant_length=objective.constant_length)
            batches = make_batches(
                samples, max_tokens=config.max_tokens, weights=weights, trees=trees, enough=enough
            )
            minibatches.append(
                Minibatch(
                    batches=batches if self.reference is None else self.reference.score(batches),
                    terms=[
                        (term, term.part(items, part, count, trees=trees))
                        for term, items in zip(self.terms, drawn, strict=True)
                        if len(items)
                    ],
                    critic_rows=[row for g in chosen for row in rows.critic_rows_of[g]],
                )
            )
        return minibatches

    def _update(
        self,
        minibatches: Sequence[Minibatch],
        values: Mapping[str, float],
        history: Sequence[Metrics],
        *,
        counts_tokens: bool,
        monitor: LogprobMonitor,
    ) -> Metrics:
        """Every pass over the minibatches; each update passes the guards before it is applied.

        Raises GuardTripped.
        """
        learner, config, critic = self.learner, self.config, self.critic

        def guard(update: int, metrics: Metrics) -> None:
            judged = {**values, **metrics, **monitor.metrics, "update": float(update)}
            if not counts_tokens:
                judged.pop("tokens", None)  # those of the terms are counted by themselves
            check_step(judged, config.guards, earlier=history, bfloat16=config.dtype == "bfloat16")

        order = _order(len(minibatches), config, learner.step)
        later = {index: minibatches[index].with_old(learner.model) for index in sorted(set(order[1:]))}
        for batch in (b for index, part in later.items() if index != order[0] for b in part.batches):
            assert batch.old_logprobs_BT is not None
            monitor.observe(batch, batch.old_logprobs_BT)
        rows = []
        for update, index in enumerate(order):
            # the first update needs no old log-probs: they would come from the same weights
            minibatch = minibatches[index] if update == 0 else later[index]
            ends_step = update == len(order) - 1
            learned = update_minibatch(
                learner, minibatch, config.objective, partial(guard, update), terms=self.terms,
                ends_step=ends_step, on_logprobs=monitor.observe if update == 0 else None,
            )  # fmt: skip
            rows.append(learned)
            if critic is not None and minibatch.critic_rows:
                rows[-1] |= critic.update(minibatch.critic_rows, ends_step=ends_step)
        return {**_over_updates(rows, passes=config.updates_per_step), **monitor.metrics}


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
    """Share of the trained tokens that an older policy version sampled."""
    tokens = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    return sum(v != version for v in tokens) / max(1, len(tokens))


def shuffled(groups: Sequence[Group], random: Random) -> list[Group]:
    """The negative control: the verdicts permuted over the rollouts of the step."""
    # turn rewards are dropped: the other rollout may have another number of turns
    verdicts = [
        t.verdict and t.verdict.model_copy(update={"turn_rewards": None})
        for g in groups
        for t in g.trajectories
    ]
    random.shuffle(verdicts)
    return [
        replace(
            g, trajectories=tuple(t.model_copy(update={"verdict": verdicts.pop()}) for t in g.trajectories)
        )
        for g in groups
    ]
