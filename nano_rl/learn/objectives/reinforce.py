"""REINFORCE: the reward times the gradient of the log-prob, unclipped (Williams 1992).

    loss = mean over rollouts of sum over tokens of -A log p            A = r, without a baseline

`baseline` = mean or rloo is allowed; KL, if any, is in the reward as k1. There is no trainer's ratio: after
the first update of a step its gradient is that of the moved policy on tokens of the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nano_rl.learn.config.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.learn.config.objective import ObjectiveConfig


def unclipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig) -> Tensor:
    """[N] loss of each token; the ratio and the bounds are not read."""
    return -advantages_N * new_N


NO_RATIO = ("clip_low", "clip_high", "dual_clip", "ratio")

REINFORCE = Objective(
    surrogate=unclipped,
    defaults={
        "baseline": "none", "std": "none", "aggregation": "constant", "constant_length": 1,
        "kl": "k1", "kl_in": "reward",
    },
    unused=NO_RATIO,
)  # fmt: skip
