"""The clipped surrogate of PPO, with separate bounds and an optional dual clip, and the default objective.

    surrogate   -min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most c |A|
    recipe      A_i = r_i - mean; mean of the surrogate over all tokens; every setting free

Schulman et al. 2017 (arXiv 1707.06347); separate bounds: DAPO (arXiv 2503.14476); dual clip: Ye et al. 2020
(arXiv 1912.09729). `recipe` takes the group mean alone from Dr. GRPO (arXiv 2503.20783) and the token mean
from DAPO.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.learn.config import ObjectiveConfig
from nano_rl.learn.config import Objective


def clipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig) -> Tensor:
    """[N] loss of each token; `new_N` is not read but through the ratio."""
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N = -(ratio_N * advantages_N).minimum(bounded_N * advantages_N)
    if config.dual_clip is None:
        return loss_N
    # has no effect for A > 0, where the loss is negative
    return loss_N.minimum(config.dual_clip * advantages_N.abs())


RECIPE = Objective(surrogate=clipped)
