"""The loss of the policy: an objective's surrogate, importance weights, KL and entropy, summed by weight.

    loss = sum over trained tokens of share * ( w * surrogate(r, A) + beta * kl - bonus * entropy )
    r = new / old          both the trainer's: exactly 1 on the first update of a step
    w = old / behaviour    what the sampler, or an older policy, did differently: truncated or masked

The surrogates stand in `objectives/`, the shares in `aggregation.py`. The KL term and the entropy carry no
importance weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nano_rl.batch import Batch
from nano_rl.objectives.config import ObjectiveConfig
from nano_rl.objectives.importance import importance_weights, kept_sequences
from nano_rl.objectives.kl import less_kl, reference_kl
from nano_rl.objectives.ratio import clamped_exp, row_means
from nano_rl.objectives.registry import OBJECTIVES
from nano_rl.objectives.tokens import Tokens


def policy_loss(
    logprobs_BT: Tensor, batch: Batch, config: ObjectiveConfig, *, entropy_BT: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The scalar loss of a micro-batch and its metrics; both add up over the micro-batches of a step.

    `logprobs_BT` are the current log-probs with gradient. A batch without trained tokens gives exactly 0.0.
    Metrics are sums over trained tokens, to be averaged by `mean_metrics`; keys ending in `_max` are maxima.

    Raises ValueError when beta > 0 and the batch carries no reference log-probs, and when an entropy bonus
    comes without entropies, or with entropies that have no gradient.
    """
    mask = batch.mask_BT
    entropy_N = None if entropy_BT is None else entropy_BT[mask]
    return token_loss(logprobs_BT[mask], Tokens.of(batch), config, entropy_N=entropy_N)


def token_loss(
    new_N: Tensor, tokens: Tokens, config: ObjectiveConfig, *, entropy_N: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """As `policy_loss`, on the trained tokens alone.

    Where `config.separable`, any slice of a step's tokens will do, and the slices add up to the whole;
    otherwise `tokens` must hold whole rows.
    """
    tokens = tokens.to(new_N)
    # the same tensor twice, so that the ratio is exactly 1 and its gradient that of REINFORCE
    old_N = new_N.detach() if tokens.old_N is None else tokens.old_N
    log_ratio_N, mismatch_N = new_N - old_N, old_N - tokens.behaviour_N
    if config.ratio == "sequence":
        log_ratio_N = row_means(log_ratio_N, tokens.row_N)
    ratio_N = clamped_exp(log_ratio_N)
    raw_N, weight_N = importance_weights(mismatch_N, tokens.row_N, config)
    advantages_N = tokens.advantages_N
    sums: dict[str, Tensor] = {}
    if config.reject_drift is not None:
        kept_N = kept_sequences(new_N, tokens.behaviour_N, advantages_N, tokens.row_N, config.reject_drift)
        weight_N = weight_N * kept_N
        sums["rejected"] = ~kept_N
    charge_N = None
    if config.beta > 0:
        reference_N = _needed(
            tokens.reference_N,
            "beta > 0 needs reference_logprobs_BT in the batch; score it with the reference first",
        )
        in_loss = config.kl_in == "loss"
        charge_N = reference_kl(new_N if in_loss else old_N, reference_N, config.kl)
        sums["kl_reference"] = charge_N
        if not in_loss:
            advantages_N = less_kl(advantages_N, charge_N, tokens.row_N, config.beta)
            charge_N = None

    loss_N = weight_N * OBJECTIVES[config.objective].surrogate(new_N, ratio_N, advantages_N, config)
    if charge_N is not None:
        loss_N = loss_N + config.beta * charge_N
    if config.entropy_bonus > 0:
        loss_N = loss_N - config.entropy_bonus * _with_gradient(entropy_N, new_N)
    loss = (tokens.weight_N * loss_N).sum()

    with torch.no_grad():
        sums |= _ratio_metrics(ratio_N, log_ratio_N, advantages_N, config)
        sums |= _mismatch_metrics(mismatch_N, raw_N, config)
        if entropy_N is not None:
            sums["entropy"] = entropy_N
    return loss, {"loss": loss.item(), "tokens": float(new_N.numel()), **_reduce(sums)}


def sft_loss(logprobs_BT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Negative log-likelihood, nats, of the trained tokens by their weights: the token mean by default."""
    nll_N = -logprobs_BT[batch.mask_BT]
    loss = (batch.weight_BT[batch.mask_BT].to(nll_N) * nll_N).sum()
    return loss, {"loss": loss.item(), "tokens": float(nll_N.numel())}


def mean_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its micro-batches: means over trained tokens, and `ess`.

    `ess` is the effective sample size of the untruncated weights as a share of the tokens, in (0, 1]
    (Kish 1965). `loss` and `tokens` are totals, keys ending in `_max` maxima.
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith("_max"):
                total[name] = max(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0.0) + value
    tokens = max(total.get("tokens", 0.0), 1.0)
    kept = {name for name in total if name in ("loss", "tokens") or name.endswith("_max")}
    mean = {name: value if name in kept else value / tokens for name, value in total.items()}
    if mean.get("weight_squared"):
        mean["ess"] = mean["weight"] ** 2 / mean["weight_squared"]
    return mean


def _needed(values_N: Tensor | None, otherwise: str) -> Tensor:
    if values_N is None:
        raise ValueError(otherwise)
    return values_N


def _with_gradient(entropy_N: Tensor | None, new_N: Tensor) -> Tensor:
    entropy_N = _needed(entropy_N, "entropy_bonus > 0 needs the entropies of the tokens")
    if new_N.requires_grad and new_N.numel() and not entropy_N.requires_grad:
        raise ValueError("entropy_bonus > 0 needs entropies with gradient: without it the bonus does nothing")
    return entropy_N


def _ratio_metrics(
    ratio_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
) -> dict[str, Tensor]:
    """`clip_low` and `clip_high` count tokens whose gradient the bounds take away or, in CISPO, bound."""
    deviation_N = (ratio_N - 1).abs()
    below_N, above_N = ratio_N < 1 - config.clip_low, ratio_N > 1 + config.clip_high
    if config.objective in ("reinforce", "rloo"):
        below_N = above_N = torch.zeros_like(below_N)
    elif config.objective != "cispo":
        below_N, above_N = below_N & (advantages_N < 0), above_N & (advantages_N > 0)
    metrics = {
        "ratio_deviation": deviation_N,
        "ratio_deviation_max": deviation_N,
        "clip_low": below_N,
        "clip_high": above_N,
        "approx_kl": ratio_N - 1 - log_ratio_N,
    }
    if config.dual_clip is not None:
        metrics["clip_dual"] = (ratio_N > config.dual_clip) & (advantages_N < 0)
    return metrics


def _mismatch_metrics(mismatch_N: Tensor, raw_N: Tensor, config: ObjectiveConfig) -> dict[str, Tensor]:
    cap = float("inf") if config.tis_cap is None else config.tis_cap
    metrics = {
        "mismatch": mismatch_N.abs(),
        "mismatch_max": mismatch_N.abs(),
        "mismatch_ratio": clamped_exp(mismatch_N.abs()),
        "mismatch_kl": clamped_exp(mismatch_N) - 1 - mismatch_N,
        "weight": raw_N,
        "weight_squared": raw_N.square(),
        "weight_capped": raw_N > cap,
    }
    if config.tis_floor > 0:
        metrics["weight_below_floor"] = raw_N < config.tis_floor
    return metrics


def _reduce(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all metrics. The maximum of nothing is 0."""
    totals = [
        (t.max() if t.numel() else t.sum()).double() if name.endswith("_max") else t.detach().double().sum()
        for name, t in sums.items()
    ]
    return dict(zip(sums, torch.stack(totals).tolist(), strict=True))
