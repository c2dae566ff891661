"""One step of the policy: groups with a signal -> credit -> samples -> minibatches -> guarded updates.

A step passes `updates_per_step` times over its rollouts, each time in `minibatches` parts of whole groups,
and each part is one update of the weights with denominators of its own. The trainer's log-probs are taken
once, before the first update, so that the ratio of every later one is real; on the first it is exactly 1.

Terms beside the policy's own loss are in `loss_terms.py`. Logged runs bring rows of older policies: those
too old, or too far for the bound on the effective sample size, leave first (`staleness.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

from torch import Tensor

from nano_rl.learn.config.training import UpdateConfig
from nano_rl.learn.credit.baselines import Baselines
from nano_rl.learn.credit.turns import RewardParts, has_signal
from nano_rl.learn.guards import check_step
from nano_rl.learn.loss_terms import LossTerm, Minibatch, update_minibatch
from nano_rl.learn.model.critic import Critic, explained_variance
from nano_rl.learn.model.first_look import FirstLook
from nano_rl.learn.model.learner import Learner, Reference
from nano_rl.learn.model.logprob import can_share
from nano_rl.learn.model.probe import Probe
from nano_rl.learn.objectives.aggregation import token_weights
from nano_rl.learn.rows.batch import make_batches
from nano_rl.learn.rows.group import Group
from nano_rl.learn.rows.sample import TrainSample
from nano_rl.learn.sampler_check import mismatch_ahead
from nano_rl.learn.staleness import within_ess
from nano_rl.learn.step_rows import StepRows

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Updater:
    """What the steps of a training learn with."""

    learner: Learner
    config: UpdateConfig
    reward: RewardParts | None = None
    """the parts of a composed reward, for objectives that compare each part by itself"""
    reference: Reference | None = None
    """where `beta` is above 0"""
    critic: Critic | None = None
    terms: Sequence[LossTerm] = ()
    """losses beside the policy's own"""

    def learn(
        self,
        groups: Sequence[Group],
        values: Mapping[str, float],
        *,
        version: int,
        history: Sequence[Metrics] = (),
        logged: Mapping[str, int] | None = None,
        baselines: Baselines | None = None,
        probe: Probe | None = None,
        sampled_by: Mapping[str, Tensor] | None = None,
    ) -> Metrics:
        """All updates of one step, and its metrics; none at all where there is nothing to learn.

        `values` are the step's metrics so far and `history` those of the steps before, for the guards.
        `logged` are the runs of the step that come from a log, with the version that sampled each;
        `baselines` is what they are compared with over time. `probe` is a row of the step that was scored
        apart, `sampled_by` the weights that rolled the step out ahead of time, where they were others. Added
        to what the objective reports: `updates`, `stale`, `stale_dropped` (tokens), `tree_fallback` (1 where
        the model runs on independent rows), `skipped`; of logged runs `ess_logged`, `ess_kept`,
        `weight_dropped`, and `all_dropped` where nothing was near enough; what the first look saw; with a
        critic `value_*`; with terms beside the loss what `update_minibatch` says.
        """
        config, objective, logged = self.config, self.config.objective, logged or {}
        live = [group for group in groups if has_signal(group, objective, self.reward)]
        if config.shuffle_rewards:
            # imitation is a control too: what it takes for successes must be shuffled with the rest
            groups = live = shuffled(live, Random(f"shuffle {config.seed} {self.learner.step}"))
        beside = [term.draw(self.learner.step, groups) for term in self.terms]
        if not (live or any(map(len, beside))):
            return self._skipped(values, history, {})
        if self.critic is None:
            rows = StepRows.compared(live, objective, self.reward, baselines or Baselines())
        else:
            rows = StepRows.valued(live, objective, self.critic)
        if self.critic is not None or objective.over_time:
            # what is expected comes from elsewhere: groups whose rewards are equal do teach
            values = {**values, "frac_zero_std": 0.0}
        trees = can_share(self.learner.model)
        rows, counts = self._near(rows.aged(logged), logged, version, trees=trees)
        if not (rows.samples or any(map(len, beside))):
            return self._skipped(values, history, {**counts, "all_dropped": 1.0})
        told = {**counts, "stale": _stale(rows.samples, version)}
        if sampled_by is not None:
            told |= mismatch_ahead(self.learner.model, rows.samples, sampled_by, max_tokens=config.max_tokens)
        fresh = {s.run_id for s in rows.samples if min(s.versions) == version} if told["stale"] else set()
        learned = self._update(
            self._minibatches(rows, beside, trees=trees), {**values, **told}, history,
            counts_tokens=bool(rows.samples), look=FirstLook(probe, fresh),
        )  # fmt: skip
        if self.critic is not None:
            learned |= explained_variance(rows.lessons)
        return {**learned, **told, "tree_fallback": float(not trees), "skipped": 0.0}

    def _skipped(self, values: Mapping[str, float], history: Sequence[Metrics], counts: Metrics) -> Metrics:
        """A step without an update, which is judged and counted all the same."""
        check_step({**values, **counts}, self.config.guards, earlier=history)
        self.learner.step += 1
        return {"skipped": 1.0, **counts}

    def _near(
        self, rows: StepRows, logged: Mapping[str, int], version: int, *, trees: bool
    ) -> tuple[StepRows, Metrics]:
        """The rows that are young enough, and of logged runs those within the bound on the effective sample
        size; and what left."""
        rows, dropped = rows.recent(version, self.config.objective.max_staleness)
        counts, bounds = {"stale_dropped": float(dropped)}, self.config.logs
        old = {run for run, born in logged.items() if born != version}
        if not old or (bounds.min_ess == 0 and bounds.max_drift is None):
            return rows, counts
        near = within_ess(
            self.learner.model, rows.samples, old, bounds.min_ess, drift=bounds.max_drift,
            max_tokens=self.config.max_tokens, trees=trees,
        )  # fmt: skip
        return (rows, counts) if near is None else (rows.without(near.gone), counts | near.metrics)

    def _minibatches(
        self, rows: StepRows, beside: Sequence[Sequence[Any]], *, trees: bool
    ) -> list[Minibatch]:
        """Whole groups dealt out in a seeded order; as many parts as there are groups where those are
        fewer."""
        config, objective = self.config, self.config.objective
        groups = list(range(len(rows.samples_of)))
        count = max(1, min(config.minibatches, len(groups)))
        if count > 1:
            Random(f"minibatches {config.seed} {self.learner.step}").shuffle(groups)
        minibatches = []
        for part in range(count):
            chosen = groups[part::count]
            samples = [s for g in chosen for s in rows.samples_of[g]]
            weights = token_weights(samples, objective.aggregation, constant_length=objective.constant_length)
            batches = make_batches(samples, max_tokens=config.max_tokens, weights=weights, trees=trees)
            minibatches.append(
                Minibatch(
                    batches=batches if self.reference is None else self.reference.score(batches),
                    terms=[
                        (term, term.part(drawn, part, count, trees=trees))
                        for term, drawn in zip(self.terms, beside, strict=True)
                        if len(drawn)
                    ],
                    lessons=[lesson for g in chosen for lesson in rows.lessons_of[g]],
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
        look: FirstLook,
    ) -> Metrics:
        """Every pass over the minibatches, each update judged before it is applied. Raises GuardTripped."""
        learner, config, critic = self.learner, self.config, self.critic

        def guard(update: int, metrics: Metrics) -> None:
            judged = {**values, **metrics, **look.metrics, "update": float(update)}
            if not counts_tokens:
                judged.pop("tokens", None)  # what stands beside counts its own
            check_step(judged, config.guards, earlier=history, bfloat16=config.dtype == "bfloat16")

        order = _order(len(minibatches), config, learner.step)
        later = {index: minibatches[index].with_old(learner.model) for index in sorted(set(order[1:]))}
        for batch in (b for index, part in later.items() if index != order[0] for b in part.batches):
            assert batch.old_logprobs_BT is not None
            look.see(batch, batch.old_logprobs_BT)
        rows = []
        for update, index in enumerate(order):
            # the weights of the first update are those that the old log-probs would be taken from
            minibatch = minibatches[index] if update == 0 else later[index]
            ends_step = update == len(order) - 1
            learned = update_minibatch(
                learner, minibatch, config.objective, partial(guard, update), terms=self.terms,
                ends_step=ends_step, look=look.see if update == 0 else None,
            )  # fmt: skip
            rows.append(learned)
            if critic is not None and minibatch.lessons:
                rows[-1] |= critic.update(minibatch.lessons, ends_step=ends_step)
        return {**_over_updates(rows, passes=config.updates_per_step), **look.metrics}


def _order(count: int, config: UpdateConfig, step: int) -> list[int]:
    """The minibatch of each update: every pass sees all of them, each later pass in a seeded order."""
    order = list(range(count))
    for later in range(1, config.updates_per_step):
        again = list(range(count))
        Random(f"pass {config.seed} {step} {later}").shuffle(again)
        order += again
    return order


def _over_updates(rows: Sequence[dict[str, float]], *, passes: int) -> dict[str, float]:
    """The metrics of a step: means over its updates, maxima of maxima, and its tokens counted once."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name.endswith("_max"):
            merged[name] = max(values)
        elif name in ("tokens", "sft_tokens", "preference_pairs"):
            merged[name] = sum(values) / passes
        else:
            merged[name] = sum(values) / len(values)
    return {**merged, "updates": float(len(rows))}


def _stale(samples: Sequence[TrainSample], version: int) -> float:
    """Share of the trained tokens that an older policy sampled."""
    tokens = [v for s in samples for v, m in zip(s.versions, s.mask, strict=True) if m]
    return sum(v != version for v in tokens) / max(1, len(tokens))


def shuffled(groups: Sequence[Group], random: Random) -> list[Group]:
    """The negative control: the same verdicts, each on another rollout."""
    # what each turn earned is another rollout's too, which may have had another number of turns
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
