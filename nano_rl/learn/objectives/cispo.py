"""CISPO: the ratio is a clamped weight without gradient, so that no token is dropped (arXiv 2506.13585).

    loss = mean over tokens of -stop_gradient(clip(r, 1 - low, 1 + high)) A log p

The paper bounds the weight from above only, by a tuned constant: here 1 + 4 = 5. `clip_low` = 1 means no
lower bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nano_rl.learn.config import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.learn.config import ObjectiveConfig


def weighted(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig) -> Tensor:
    """[N] loss of each token; the ratio has no gradient."""
    weight_N = ratio_N.detach().clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight_N * advantages_N * new_N


CISPO = Objective(
    surrogate=weighted,
    defaults={
        "baseline": "mean", "std": "sample", "ratio": "token", "clip_low": 1.0, "clip_high": 4.0,
        "aggregation": "token", "beta": 0.0,
    },
    fixed=("baseline", "ratio"),
    unused=("dual_clip",),
)  # fmt: skip
