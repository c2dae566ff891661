"""REINFORCE: the reward times the gradient of the log-prob, unclipped (Williams 1992).

    loss = mean over rollouts of sum over tokens of -A log p            A = r, without a baseline

`baseline` = mean or rloo is allowed; KL, if any, is subtracted from the reward as k1. The ratio is not used:
from the second update of a step on, the gradient is off-policy without correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nano_rl.learn.config import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.learn.config import ObjectiveConfig


def unclipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig) -> Tensor:
    """[N] loss of each token; the ratio and its bounds are not used."""
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
