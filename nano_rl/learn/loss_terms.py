"""The loss of one update: the policy's own and the terms beside it, each with its weight and its share.

    L = L_RL + beta * L_KL + sum over terms of weight * L_term

L_RL and L_KL are means over the trained tokens of the rollouts. A term is a mean over what it learns from
(imitation: trained tokens of demonstrations; preferences: pairs), so that the size of none of them changes
what another weighs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nano_rl.learn.config.objective import ObjectiveConfig
from nano_rl.learn.model.critic import Lesson
from nano_rl.learn.model.learner import Guard, Learner, LossPart
from nano_rl.learn.model.logprob import TokenScores, loss_and_scores, token_logprobs
from nano_rl.learn.objectives.loss import policy_loss
from nano_rl.learn.rows.batch import Batch
from nano_rl.learn.rows.group import Group

Metrics = dict[str, float]


class TermPart(Protocol):
    """What one update learns from by a term."""

    batches: Sequence[Batch]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        """The batch's share of the unweighted loss, and metrics: `loss` and `tokens`, which add up."""

    def metrics(self) -> Metrics:
        """Metrics of the part under names of their own, once every batch has been seen."""


class LossTerm(Protocol):
    """A loss beside the policy's own: imitation, preferences."""

    name: str
    """`loss_NAME` and `share_NAME` are its metrics"""
    weight: float

    def draw(self, step: int, groups: Sequence[Group]) -> Sequence[Any]:
        """What a step learns from by this term; empty where there is nothing."""

    def part(self, drawn: Sequence[Any], index: int, count: int, *, trees: bool) -> TermPart:
        """The part of what was drawn that belongs to one of `count` minibatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one update learns from."""

    batches: list[Batch]
    """rollouts, for the policy's objective"""
    terms: list[tuple[LossTerm, TermPart]]
    """the terms that have something in this minibatch"""
    lessons: list[Lesson]
    """rollouts, for the critic; empty without one"""

    def with_old(self, model: nn.Module) -> Minibatch:
        """The same with the log-probs of the weights as they are."""
        with torch.no_grad():
            return replace(self, batches=[b.with_old(token_logprobs(model, b)) for b in self.batches])


Look = Callable[[Batch, Tensor], None]
"""sees the log-probs that an update computes of a batch"""


def update_minibatch(
    learner: Learner,
    minibatch: Minibatch,
    objective: ObjectiveConfig,
    guard: Guard,
    *,
    terms: Sequence[LossTerm] = (),
    ends_step: bool,
    look: Look | None = None,
) -> Metrics:
    """One update. With `terms`, metrics say how each part of the loss is weighted (`loss_policy`, `loss_kl`,
    `loss_NAME`) and what its share in the sum of magnitudes is (`share_*`), with the terms' own metrics."""
    sums = {term.name: 0.0 for term in terms}

    def reinforce(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        return loss_and_scores(
            model, batch, partial(_policy_loss, batch, objective, look),
            separable=objective.separable, entropy_gradient=objective.entropy_bonus > 0,
        )  # fmt: skip

    def weighted(term: LossTerm, part: TermPart, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, metrics = part.loss(model, batch)
        sums[term.name] += term.weight * metrics["loss"]
        return term.weight * loss, {"loss": term.weight * metrics["loss"]}

    parts: list[LossPart] = [(batch, reinforce) for batch in minibatch.batches]
    for term, part in minibatch.terms:
        parts += [(batch, partial(weighted, term, part)) for batch in part.batches]
    metrics = learner.update_parts(parts, guard, ends_step=ends_step)
    if not terms:
        return metrics
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
    whole: Batch, objective: ObjectiveConfig, look: Look | None, scores: TokenScores, batch: Batch
) -> tuple[Tensor, Metrics]:
    # slices of the batch come here too, while the head's gradient is formed
    if look is not None and batch is whole:
        look(batch, scores.logprobs_BT.detach())
    return policy_loss(scores.logprobs_BT, batch, objective, entropy_BT=scores.entropy_BT)
