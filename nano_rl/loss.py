"""The PPO-clip surrogate over weights fixed for the whole step, truncated importance weights, optional KL.

    loss = sum over trained tokens of ( -w * min(r * A, clip(r) * A) + beta * kl ) * weight
    r = new / old          both the trainer's: exactly 1 on the first update of a step
    w = min(old / behaviour, tis_cap)          what the sampler, or an older policy, did differently

Surrogate: Schulman et al. 2017 (arXiv 1707.06347); separate bounds and the token mean: DAPO (arXiv
2503.14476); weights: truncated importance sampling (Ionides 2008), per token. Left out: per-sequence
means, dual clip, CISPO, GSPO, an entropy bonus; the KL term carries no importance weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nano_rl.batch import Batch
from nano_rl.config import KL, ObjectiveConfig
from nano_rl.objectives.tokens import Tokens

MAX_LOG_RATIO = 20.0
"""log-ratios are clamped to this before exp, in nats; the gradient beyond it is zero"""


def policy_loss(
    logprobs_BT: Tensor, batch: Batch, config: ObjectiveConfig, *, entropy_BT: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The scalar loss of a micro-batch and its metrics; both add up over the micro-batches of a step.

    `logprobs_BT` are the current log-probs with gradient. A batch without trained tokens gives exactly 0.0.
    Metrics are sums over trained tokens, to be averaged by `mean_metrics`; keys ending in `_max` are maxima.

    Raises ValueError when beta > 0 and the batch carries no reference log-probs.
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
    mismatch_N = old_N - tokens.behaviour_N
    ratio_N = _exp(new_N - old_N)
    weight_N = _exp(mismatch_N)

    clipped_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N = -torch.minimum(ratio_N * tokens.advantages_N, clipped_N * tokens.advantages_N)
    if config.tis_cap is not None:
        loss_N = loss_N * weight_N.clamp(max=config.tis_cap)
    sums: dict[str, Tensor] = {}
    if config.beta > 0:
        if tokens.reference_N is None:
            raise ValueError(
                "beta > 0 needs reference_logprobs_BT in the batch; score it with the reference first"
            )
        kl_N = reference_kl(new_N, tokens.reference_N, config.kl)
        loss_N = loss_N + config.beta * kl_N
        sums["kl_reference"] = kl_N
    loss = (tokens.weight_N * loss_N).sum()

    with torch.no_grad():
        sums |= _ratio_metrics(ratio_N, new_N - old_N, tokens.advantages_N, config)
        sums |= _mismatch_metrics(mismatch_N, weight_N, config)
        if entropy_N is not None:
            sums["entropy"] = entropy_N
    return loss, {"loss": loss.item(), "tokens": float(new_N.numel()), **_reduce(sums)}


def sft_loss(logprobs_BT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Negative log-likelihood, nats, of the trained tokens by their weights: the token mean by default."""
    nll_N = -logprobs_BT[batch.mask_BT]
    loss = (batch.weight_BT[batch.mask_BT].to(nll_N) * nll_N).sum()
    return loss, {"loss": loss.item(), "tokens": float(nll_N.numel())}


def reference_kl(new_N: Tensor, reference_N: Tensor, kind: KL) -> Tensor:
    """[N] per-token estimate of KL(new || reference) from tokens of `new` (Schulman 2020).

    k1 and k3 have the right expected *value*; as a loss, differentiated on-policy, only k2 has the right
    *gradient*: k1's is zero in expectation and k3's is that of the forward KL.
    """
    log_ratio_N = new_N - reference_N
    if kind == "k1":
        return log_ratio_N
    if kind == "k2":
        return log_ratio_N.square() / 2
    return _exp(-log_ratio_N) - 1 + log_ratio_N


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


def _exp(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _ratio_metrics(
    ratio_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig
) -> dict[str, Tensor]:
    deviation_N = (ratio_N - 1).abs()
    return {
        "ratio_deviation": deviation_N,
        "ratio_deviation_max": deviation_N,
        "clip_low": (ratio_N < 1 - config.clip_low) & (advantages_N < 0),
        "clip_high": (ratio_N > 1 + config.clip_high) & (advantages_N > 0),
        "approx_kl": ratio_N - 1 - log_ratio_N,
    }


def _mismatch_metrics(mismatch_N: Tensor, weight_N: Tensor, config: ObjectiveConfig) -> dict[str, Tensor]:
    cap = float("inf") if config.tis_cap is None else config.tis_cap
    return {
        "mismatch": mismatch_N.abs(),
        "mismatch_max": mismatch_N.abs(),
        "mismatch_kl": weight_N - 1 - mismatch_N,
        "weight": weight_N,
        "weight_squared": weight_N.square(),
        "weight_capped": weight_N > cap,
    }


def _reduce(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all metrics. The maximum of nothing is 0."""
    totals = [
        (t.max() if t.numel() else t.sum()).double() if name.endswith("_max") else t.detach().double().sum()
        for name, t in sums.items()
    ]
    return dict(zip(sums, torch.stack(totals).tolist(), strict=True))
