"""The policy loss: surrogate, importance weights, KL to the reference and entropy, aggregated over tokens.

    loss = sum over trained tokens of share * ( w * surrogate(r, A) + beta * kl - bonus * entropy )
    r = new / old          both from the trainer; exactly 1 on the first update of a step
    w = old / behaviour    importance weight for the sampler, or an older policy; truncated or masked

    aggregation   share of a trained token
    token         1 / trained tokens of the step                          DAPO (arXiv 2503.14476)
    sequence      1 / (trajectories x trained tokens of the trajectory)   GRPO (arXiv 2402.03300)
    constant      1 / (trajectories x a constant length)                  Dr. GRPO (arXiv 2503.20783)

Shares are fixed for the whole step before it is split into micro-batches. The rows of one trajectory share
its length, so that a rewritten history does not change its weight; a trajectory without a trained token is
not counted. The KL and entropy terms have no importance weight. Surrogates are in `objectives.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from nano_rl.learn.batch import Batch
from nano_rl.learn.groups import TrainSample
from nano_rl.learn.objectives import KL, Aggregation, Objective, weighted
from nano_shared.errors import UsageError
from nano_shared.extension_points import call_extension, is_ours


def token_weights(
    samples: Sequence[TrainSample], aggregation: Aggregation = "token", *, constant_length: int = 1
) -> list[float]:
    """[S] the share of every trained token of each sample, of all those of a step. Samples with the same
    `run_id` are one trajectory. Raises ValueError if `constant_length` is below 1."""
    if constant_length < 1:
        raise ValueError(f"constant_length={constant_length} must be at least 1")
    tokens_of: Counter[str] = Counter()
    for sample in samples:
        tokens_of[sample.run_id] += sample.num_action_tokens
    tokens, trajectories = tokens_of.total(), sum(count > 0 for count in tokens_of.values())
    return [
        token_share(
            aggregation, own=tokens_of[s.run_id], tokens=tokens, trajectories=trajectories,
            constant_length=constant_length,
        )
        for s in samples
    ]  # fmt: skip


def token_share(
    aggregation: Aggregation, *, own: int, tokens: int, trajectories: int, constant_length: int
) -> float:
    """The share of a token in a trajectory with `own` of the step's `tokens` trained tokens."""
    if own == 0:
        return 0.0
    if aggregation == "token":
        return 1 / tokens
    return 1 / (trajectories * (constant_length if aggregation == "constant" else own))


MAX_LOG_RATIO = 20.0
"""bound of |log-ratio| before exp, nats; the gradient beyond it is 0"""


def clamped_exp(log_ratio_N: Tensor) -> Tensor:
    """exp of the log-ratio, clamped to +-MAX_LOG_RATIO so that it stays finite."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def row_sums(values_N: Tensor, row_N: Tensor) -> Tensor:
    """[N] the sum over each token's row."""
    if not row_N.numel():
        return values_N
    rows = int(row_N.max()) + 1
    return values_N.new_zeros(rows).index_add(0, row_N, values_N)[row_N]


def row_means(values_N: Tensor, row_N: Tensor) -> Tensor:
    return row_sums(values_N, row_N) / row_sums(torch.ones_like(values_N), row_N)


def sums_to_the_end(values_N: Tensor, row_N: Tensor) -> Tensor:
    """[N] the sum over each token and all later ones in its row. Tokens are ordered by row and position."""
    # float64, because the running sum is over all rows
    before_N = values_N.double().cumsum(0) - values_N.double()
    if not row_N.numel():
        return values_N
    starts = torch.ones_like(row_N, dtype=torch.bool)
    starts[1:] = row_N[1:] != row_N[:-1]
    offset_N = before_N[starts][starts.cumsum(0) - 1]
    return (row_sums(values_N.double(), row_N) - (before_N - offset_N)).to(values_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The N tokens where the mask is True, in the order that `logprobs_BT[mask_BT]` gives them."""

    weight_N: Tensor
    advantages_N: Tensor
    behaviour_N: Tensor
    row_N: Tensor
    old_N: Tensor | None
    """the trainer's log-probs at the start of the step; None if the weights have not changed since"""
    reference_N: Tensor | None
    """log-probs of the reference model; required if beta > 0"""

    @classmethod
    def of(cls, batch: Batch) -> Tokens:
        mask = batch.mask_BT
        old, reference = batch.old_logprobs_BT, batch.reference_logprobs_BT
        return cls(
            weight_N=batch.weight_BT[mask],
            advantages_N=batch.advantages_BT[mask],
            behaviour_N=batch.behaviour_logprobs_BT[mask],
            row_N=mask.nonzero(as_tuple=True)[0],
            old_N=None if old is None else old[mask],
            reference_N=None if reference is None else reference[mask],
        )

    def to(self, like: Tensor) -> Tokens:
        """The tokens in the dtype and on the device of `like`; `row_N` stays int64."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        there: dict[str, Any] = {
            n: None if v is None else v.to(like.device if n == "row_N" else like) for n, v in values.items()
        }
        return Tokens(**there)


def reference_kl(new_N: Tensor, reference_N: Tensor, kind: KL) -> Tensor:
    """[N] per-token estimate of KL(new || reference), nats, from tokens sampled by `new`. Estimators k1 to
    k3: Schulman 2020, joschu.net/blog/kl-approx.html."""
    log_ratio_N = new_N - reference_N
    if kind == "k1":
        return log_ratio_N
    if kind == "k2":
        return log_ratio_N.square() / 2
    k3_N = clamped_exp(-log_ratio_N) - 1 + log_ratio_N
    if kind == "k3":
        return k3_N
    k2_N = log_ratio_N.square() / 2
    return k2_N - k2_N.detach() + k3_N.detach()


def less_kl(advantages_N: Tensor, kl_N: Tensor, row_N: Tensor, beta: float) -> Tensor:
    """[N] advantages minus beta times the KL of the token and of all later ones in its row."""
    return advantages_N - beta * sums_to_the_end(kl_N.detach(), row_N)


def importance_weights(mismatch_N: Tensor, row_N: Tensor, config: Objective) -> tuple[Tensor, Tensor]:
    """([N] raw weights, [N] truncated or masked weights). `mismatch_N` is old - behaviour, nats."""
    whole = config.tis_cap is not None and config.tis_level == "sequence"
    raw_N = clamped_exp(row_sums(mismatch_N, row_N) if whole else mismatch_N)
    if config.tis_cap is None:
        return raw_N, torch.ones_like(raw_N)
    if config.tis_mode == "truncate":
        return raw_N, raw_N.clamp(max=config.tis_cap)
    kept_N = (raw_N >= config.tis_floor) & (raw_N <= config.tis_cap)
    return raw_N, raw_N * kept_N


def kept_sequences(
    new_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, row_N: Tensor, drift: float
) -> Tensor:
    """[N] bool, False on all tokens of rejected rows (`reject_drift`)."""
    drifted_N = row_means(behaviour_N - new_N.detach(), row_N) > drift
    return ~(drifted_N & (row_means(advantages_N, row_N) < 0))


def policy_loss(
    logprobs_BT: Tensor, batch: Batch, config: Objective, *, entropy_BT: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """The scalar loss of a micro-batch and its metrics; both are summed over the micro-batches of a step.

    Metrics are sums over trained tokens, to be averaged by `mean_metrics`; those ending in `_max` are maxima,
    in `_min` minima. Raises ValueError if beta > 0 and the batch has no reference log-probs, and for an
    entropy bonus without entropies that have a gradient.
    """
    new_N, tokens = logprobs_BT[batch.mask_BT], Tokens.of(batch)
    entropy_N = None if entropy_BT is None else entropy_BT[batch.mask_BT]
    tokens = tokens.to(new_N)
    # the same tensor, so that the ratio is exactly 1 with the gradient of REINFORCE
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
    charge_N = reference_N = None
    if config.needs_reference and (reference_N := tokens.reference_N) is None:
        raise ValueError(
            "beta > 0 needs reference_logprobs_BT in the batch; score it with the reference first"
        )
    if config.beta > 0:
        assert reference_N is not None
        in_loss = config.kl_in == "loss"
        charge_N = reference_kl(new_N if in_loss else old_N, reference_N, config.kl)
        sums["kl_reference"] = charge_N
        if not in_loss:
            advantages_N = less_kl(advantages_N, charge_N, tokens.row_N, config.beta)
            charge_N = None

    own_N, own_metrics = surrogate_loss(new_N, ratio_N, advantages_N, config, reference_N)
    sums |= own_metrics
    loss_N = weight_N * own_N
    if charge_N is not None:
        loss_N = loss_N + config.beta * charge_N
    if config.entropy_bonus > 0:
        loss_N = loss_N - config.entropy_bonus * _with_gradient(entropy_N, new_N)
    loss = (tokens.weight_N * loss_N).sum()
    with torch.no_grad():
        sums |= _ratio_metrics(ratio_N, log_ratio_N, advantages_N, config)
        sums |= _mismatch_metrics(old_N, tokens.behaviour_N, raw_N, config)
        names = ("advantage_mean", "advantage_min", "advantage_max")
        sums |= {**dict.fromkeys(names, advantages_N), "advantage_squared": advantages_N.square()}
        if entropy_N is not None:
            sums["entropy"] = entropy_N
    return loss, {"loss": loss.item(), "tokens": float(new_N.numel()), **_reduce(sums)}


def surrogate_loss(
    new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective, reference_N: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """([N] the surrogate of the objective, its own metrics: name -> [N]). Raises UsageError for one of users
    that raises, or that returns anything but one loss for each token, with a gradient, and metrics."""
    surrogate = config.surrogate
    if _is_our_own(surrogate):
        return surrogate(new_N, ratio_N, advantages_N, config), {}
    named = f"the surrogate {getattr(surrogate, '__name__', surrogate)}"
    further = [reference_N] if config.reads_reference else []
    loss_N = call_extension(
        surrogate, new_N, ratio_N, advantages_N, config, *further, name=named, error=UsageError
    )
    loss_N, metrics = loss_N if isinstance(loss_N, tuple) and len(loss_N) == 2 else (loss_N, {})
    if not isinstance(loss_N, Tensor) or loss_N.shape != new_N.shape:
        given = f"a tensor {list(loss_N.shape)}" if isinstance(loss_N, Tensor) else type(loss_N).__name__
        raise UsageError(
            f"{named} returned {given} for {len(new_N)} tokens; it must return a tensor [N], the loss of each"
            " token"
        )
    if new_N.requires_grad and torch.is_grad_enabled() and not loss_N.requires_grad:
        raise UsageError(f"{named} returned a loss without a gradient; compute it from new_N or ratio_N")
    return loss_N, _own_metrics(metrics, new_N, named)


def _own_metrics(metrics: object, new_N: Tensor, named: str) -> dict[str, Tensor]:
    if not isinstance(metrics, Mapping):
        raise UsageError(f"{named} returned metrics of type {type(metrics).__name__}, and not a dict")
    found: dict[str, Tensor] = {}
    for name, value in metrics.items():
        try:
            found[f"objective_{name}"] = torch.as_tensor(value).detach().to(new_N).expand_as(new_N)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"{named} returned a metric {name!r} that is neither a number nor a tensor [N] of"
                f" {len(new_N)} tokens"
            ) from None
    return found


def _is_our_own(surrogate: object) -> bool:
    return is_ours(str(getattr(surrogate, "__module__", "")))


def probe_objective(config: Objective) -> None:
    """Call an objective of users on three made-up tokens, before a model is loaded. Raises UsageError as
    `surrogate_loss` does, and for a loss or a gradient that is NaN or infinite."""
    if _is_our_own(config.surrogate):
        return
    named = f"the surrogate {getattr(config.surrogate, '__name__', config.surrogate)}"
    new_N = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
    advantages_N = torch.tensor([1.0, -1.0, 0.5])
    reference_N = new_N.detach() - 0.1
    loss_N, _ = surrogate_loss(new_N, (new_N - new_N.detach()).exp(), advantages_N, config, reference_N)
    (slope_N,) = torch.autograd.grad(loss_N.sum(), new_N, allow_unused=True)
    if slope_N is None:
        raise UsageError(f"{named} returned a loss that does not depend on new_N or ratio_N")
    if not (loss_N.isfinite().all() and slope_N.isfinite().all()):
        raise UsageError(
            f"{named} gave the losses {loss_N.tolist()} and the gradients {slope_N.tolist()} for log-probs"
            f" {new_N.tolist()} at a ratio of 1; all must be finite"
        )


def sft_loss(logprobs_BT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Negative log-likelihood, nats, weighted by `weight_BT` (the mean over trained tokens by default)."""
    nll_N = -logprobs_BT[batch.mask_BT]
    loss = (batch.weight_BT[batch.mask_BT].to(nll_N) * nll_N).sum()
    return loss, {"loss": loss.item(), "tokens": float(nll_N.numel())}


def mean_metrics(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an update from those of its micro-batches: means over trained tokens, totals of
    `loss...` and `tokens`, extrema, and `ess`, the effective sample size of the raw importance weights as a
    share of the tokens (Kish 1965)."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if bound := EXTREMA.get(name[-4:]):
                total[name] = bound(total.get(name, value), value)
            else:
                total[name] = total.get(name, 0.0) + value
    tokens = max(total.get("tokens", 0.0), 1.0)
    totals = {name for name in total if name.startswith("loss") or name == "tokens"}
    kept = totals | {name for name in total if name[-4:] in EXTREMA}
    mean = {name: value if name in kept else value / tokens for name, value in total.items()}
    if mean.get("weight_squared"):
        mean["ess"] = mean["weight"] ** 2 / mean["weight_squared"]
    if "advantage_squared" in mean:
        variance = mean.pop("advantage_squared") - mean["advantage_mean"] ** 2
        mean["advantage_std"] = math.sqrt(max(0.0, variance))
    return mean


EXTREMA: dict[str, Callable[[float, float], float]] = {"_max": max, "_min": min}
"""end of a metric's name -> how its values are merged; those of others are averaged"""


def _with_gradient(entropy_N: Tensor | None, new_N: Tensor) -> Tensor:
    if entropy_N is None:
        raise ValueError("entropy_bonus > 0 needs the entropies of the tokens")
    if new_N.requires_grad and new_N.numel() and not entropy_N.requires_grad:
        raise ValueError("entropy_bonus > 0 needs entropies with gradient: without it the bonus does nothing")
    return entropy_N


def _ratio_metrics(
    ratio_N: Tensor, log_ratio_N: Tensor, advantages_N: Tensor, config: Objective
) -> dict[str, Tensor]:
    """`clip_low` and `clip_high`: tokens whose gradient is 0 because of the bound (CISPO: is bounded)."""
    deviation_N = (ratio_N - 1).abs()
    below_N = above_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    if config.clips:
        below_N, above_N = ratio_N < 1 - config.clip_low, ratio_N > 1 + config.clip_high
        if config.surrogate is not weighted:
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


def relative_gap(one_N: Tensor, other_N: Tensor) -> Tensor:
    """|difference| of log-probs, divided by |`other_N`| where that is above 1, since rounding grows with the
    number that is rounded."""
    return (one_N - other_N).abs() / other_N.abs().clamp(min=1)


def _mismatch_metrics(
    old_N: Tensor, behaviour_N: Tensor, raw_N: Tensor, config: Objective
) -> dict[str, Tensor]:
    cap = float("inf") if config.tis_cap is None else config.tis_cap
    mismatch_N, relative_N = old_N - behaviour_N, relative_gap(old_N, behaviour_N)
    metrics = {
        "mismatch": mismatch_N.abs(),
        "mismatch_max": mismatch_N.abs(),
        "mismatch_relative": relative_N,
        "mismatch_relative_max": relative_N,
        "mismatch_ratio": clamped_exp(mismatch_N.abs()),
        "mismatch_kl": clamped_exp(mismatch_N) - 1 - mismatch_N,
        "weight": raw_N,
        "weight_min": raw_N,
        "weight_max": raw_N,
        "weight_squared": raw_N.square(),
        "weight_capped": raw_N > cap,
    }
    if config.tis_floor > 0:
        metrics["weight_below_floor"] = raw_N < config.tis_floor
    return metrics


def _reduce(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums and extrema as floats, in one transfer from the device; of no tokens there are no extrema."""
    sums = {name: t for name, t in sums.items() if t.numel() or name[-4:] not in EXTREMA}
    totals = [
        {"_max": t.max, "_min": t.min}.get(name[-4:], t.detach().double().sum)().double()
        for name, t in sums.items()
    ]
    return dict(zip(sums, torch.stack(totals).tolist(), strict=True))
