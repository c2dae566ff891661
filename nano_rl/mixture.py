"""The loss of one update: policy gradient, KL, imitation and preference, each with its weight and its share.

    L = L_RL + beta * L_KL + lambda_sft * L_SFT + lambda_preference * L_DPO

L_RL and L_KL are means over the trained tokens of the rollouts, L_SFT over those of the demonstrations, L_DPO
over pairs, so that the size of none of them changes what another weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nano_rl.batch import Batch
from nano_rl.config import TrainConfig
from nano_rl.loss import policy_loss, sft_loss
from nano_rl.model.critic import Lesson
from nano_rl.model.learner import Guard, Learner
from nano_rl.model.logprob import TokenScores, loss_and_scores, token_logprobs
from nano_rl.preferences.dpo import PairObjective


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one update learns from."""

    batches: list[Batch]
    """rollouts, for the policy's objective"""
    imitated: list[Batch]
    """demonstrations, for maximum likelihood"""
    preferred: list[Batch]
    """both sides of pairs, for the preference loss"""
    pairs: PairObjective | None
    """the loss of `preferred`; None where there are none"""
    lessons: list[Lesson]
    """rollouts, for the critic; empty without one"""

    def with_old(self, model: nn.Module) -> Minibatch:
        """The same with the log-probs of the weights as they are."""
        with torch.no_grad():
            return replace(self, batches=[b.with_old(token_logprobs(model, b)) for b in self.batches])


Look = Callable[[Batch, Tensor], None]
"""sees the log-probs that an update computes of a batch"""


def update_mixture(
    learner: Learner,
    minibatch: Minibatch,
    config: TrainConfig,
    guard: Guard,
    *,
    ends_step: bool,
    look: Look | None = None,
) -> dict[str, float]:
    """One update. Where there is more than the policy gradient, metrics say how each part is weighted
    (`loss_*`), its share of the sum of their magnitudes (`share_*`), and what was read for it."""
    imitated = {id(batch) for batch in minibatch.imitated}
    preferred = {id(batch) for batch in minibatch.preferred}
    objective, sums = config.objective, {"sft": 0.0, "preference": 0.0, "sft_tokens": 0.0}

    rollouts = {id(batch) for batch in minibatch.batches}

    def reinforce(scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        # parts of a batch come here too
        if look is not None and id(batch) in rollouts:
            look(batch, scores.logprobs_BT.detach())
        return policy_loss(scores.logprobs_BT, batch, objective, entropy_BT=scores.entropy_BT)

    def imitate(scores: TokenScores, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        nll, metrics = sft_loss(scores.logprobs_BT, batch)
        return config.lambda_sft * nll, metrics

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        if id(batch) in imitated:
            weighted, metrics = loss_and_scores(model, batch, imitate, separable=True, entropy=False)
            sums["sft_tokens"] += metrics["tokens"]
            sums["sft"] += config.lambda_sft * metrics["loss"]
            return weighted, {"loss": config.lambda_sft * metrics["loss"]}
        if id(batch) in preferred and minibatch.pairs is not None:
            compared, metrics = minibatch.pairs(model, batch)
            sums["preference"] += config.lambda_preference * metrics["loss"]
            return config.lambda_preference * compared, {"loss": config.lambda_preference * metrics["loss"]}
        return loss_and_scores(
            model,
            batch,
            reinforce,
            separable=objective.separable,
            entropy_gradient=objective.entropy_bonus > 0,
        )

    batches = [*minibatch.batches, *minibatch.imitated, *minibatch.preferred]
    metrics = learner.update(batches, loss, guard, ends_step=ends_step)
    if config.lambda_sft == 0 and config.lambda_preference == 0:
        return metrics
    kl = objective.beta * metrics.get("kl_reference", 0.0) if objective.kl_in == "loss" else 0.0
    policy = metrics["loss"] - sums["sft"] - sums["preference"] - kl
    parts = {"policy": policy, "kl": kl, "sft": sums["sft"], "preference": sums["preference"]}
    whole = sum(map(abs, parts.values()))
    shares = {f"share_{name}": abs(part) / whole if whole else 0.0 for name, part in parts.items()}
    losses = {f"loss_{name}": part for name, part in parts.items()}
    mixed = {**metrics, **losses, **shares, "sft_tokens": sums["sft_tokens"]}
    return {**mixed, **_of_pairs(minibatch)}


def _of_pairs(minibatch: Minibatch) -> dict[str, float]:
    """`preference_pairs`, `preference_accuracy` (pairs whose chosen side gained more) and
    `preference_margin`."""
    if minibatch.pairs is None:
        return {}
    seen = minibatch.pairs.metrics()
    return {
        "preference_pairs": float(minibatch.pairs.count),
        "preference_accuracy": seen["accuracy"],
        "preference_margin": seen["margin"],
    }
