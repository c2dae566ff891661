"""CISPO: the ratio is a clamped weight without gradient, so that no token is dropped (arXiv 2506.13585).

    loss = mean over tokens of -stop_gradient(clip(r, 1 - low, 1 + high)) A log p

The paper bounds the weight from above only, and tunes that bound: here 1 + 4 = 5. `clip_low` = 1 is no lower
bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nano_rl.learn.config.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.learn.config.objective import ObjectiveConfig


def weighted(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig) -> Tensor:
    """[N] loss of each token: the gradient with respect to the ratio is zero."""
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
