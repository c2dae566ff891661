"""The clipped surrogate of PPO, with separate bounds and an optional second clip.

    -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most c |A|

Schulman et al. 2017 (arXiv 1707.06347); separate bounds: DAPO (arXiv 2503.14476); dual clip: Ye et al. 2020
(arXiv 1912.09729).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from nano_rl.learn.config.objective import ObjectiveConfig


def clipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: ObjectiveConfig) -> Tensor:
    """[N] loss of each token; `new_N` enters through the ratio alone."""
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N = -(ratio_N * advantages_N).minimum(bounded_N * advantages_N)
    if config.dual_clip is None:
        return loss_N
    # where A > 0 the loss is negative, so that the bound never binds there
    return loss_N.minimum(config.dual_clip * advantages_N.abs())
