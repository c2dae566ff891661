"""Importance weights: what the sampler, or an older policy, did differently from the trainer's policy.

    w = old / behaviour, of a token or the product over its sequence
    truncate: min(w, cap)           mask: w where floor <= w <= cap, else 0

Truncated: Ionides 2008, per token as in Yao et al. 2025; masked: IcePop (Zhao et al. 2025). Weights carry no
gradient. A masked token stays in the denominator: the weights of the step are fixed before it is scored.
Rejected sequences: off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nano_rl.objectives.config import ObjectiveConfig
from nano_rl.objectives.ratio import clamped_exp, row_means, row_sums


def importance_weights(mismatch_N: Tensor, row_N: Tensor, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """([N] weights as they are, [N] weights as they count). `mismatch_N` is old - behaviour, nats."""
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
    """[N] bool: False on every token of a row that is rejected, whatever the sign of its own advantage."""
    drifted_N = row_means(behaviour_N - new_N.detach(), row_N) > drift
    return ~(drifted_N & (row_means(advantages_N, row_N) < 0))
