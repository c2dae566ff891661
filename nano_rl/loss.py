"""The losses: clipped policy gradient and imitation, both over one global token denominator.

PPO's clipped surrogate (Schulman et al., 2017) with GRPO's group advantages (Shao et al., 2024), the
denominator global over the step (Yu et al., 2025, DAPO), and truncated importance weights for tokens that
another policy sampled. Left out here: dual clip, sequence-level ratios, entropy bonus.
"""

from __future__ import annotations

import torch

from nano_rl.batch import Batch
from nano_rl.config import ObjectiveConfig

_MAX_LOG_RATIO = 20.0


def policy_loss(
    logprobs_BT: torch.Tensor,
    batch: Batch,
    config: ObjectiveConfig,
    *,
    old_BT: torch.Tensor | None = None,
    reference_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """This micro-batch's share of the loss, and of each metric; shares add up to the step's value.

    `logprobs_BT` are the trainer's now, `old_BT` the trainer's before the first update on this data (None:
    this is that update, so the ratio is exactly 1), `reference_BT` those of the starting policy, for beta.
    """
    mask = batch.mask_BT
    if batch.num_action_tokens == 0:
        return logprobs_BT.sum() * 0.0, {}
    old = logprobs_BT.detach() if old_BT is None else old_BT
    ratio = torch.exp((logprobs_BT - old).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    advantages = batch.advantages_B[:, None].to(ratio.dtype)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    weights = importance_weights(old, batch.behaviour_BT, config.tis_cap)
    per_token = -weights * surrogate
    if config.beta and reference_BT is not None:
        per_token = per_token + config.beta * kl_estimate(logprobs_BT, reference_BT, config.kl)
    loss = per_token[mask].sum() / batch.num_action_tokens
    return loss, _metrics(logprobs_BT.detach(), ratio.detach(), weights, advantages, batch, config)


def sft_loss(logprobs_BT: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    """Mean negative log-likelihood of the masked tokens, this micro-batch's share."""
    if batch.num_action_tokens == 0:
        return logprobs_BT.sum() * 0.0, {}
    return -logprobs_BT[batch.mask_BT].sum() / batch.num_action_tokens, {}


def importance_weights(old_BT: torch.Tensor, behaviour_BT: torch.Tensor, cap: float) -> torch.Tensor:
    """[B, T] truncated importance weights min(old / behaviour, cap), without gradient."""
    difference = (old_BT.detach() - behaviour_BT.to(old_BT.dtype)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.exp(difference).clamp(max=cap)


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimates of KL(policy || reference) from samples of the policy (Schulman, 2020)."""
    difference = (logprobs - reference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    return torch.exp(-difference) - 1 + difference


def _metrics(
    logprobs: torch.Tensor,
    ratio: torch.Tensor,
    weights: torch.Tensor,
    advantages: torch.Tensor,
    batch: Batch,
    config: ObjectiveConfig,
) -> dict[str, float]:
    mask, total = batch.mask_BT, batch.num_action_tokens
    wide = advantages.expand_as(ratio)
    low = (ratio < 1 - config.clip_low) & (wide < 0)
    high = (ratio > 1 + config.clip_high) & (wide > 0)
    mismatch = (logprobs - batch.behaviour_BT).abs()[mask]
    share = lambda values: float(values[mask].float().sum()) / total  # noqa: E731
    return {
        "ratio": share(ratio),
        "ratio_deviation_max": float((ratio - 1).abs()[mask].max()) if mask.any() else 0.0,
        "clip_low": share(low),
        "clip_high": share(high),
        "importance_weight": share(weights),
        "importance_weight_squared": share(weights**2),
        "mismatch": float(mismatch.sum()) / total,
        "mismatch_max": float(mismatch.max()) if mask.any() else 0.0,
    }
