"""The objectives of papers: surrogate losses, and presets of the terms around them.

    name        loss of a token                             advantage                     share of a token
    recipe      -min(r A, clip(r, 0.8, 1.2) A)              reward - mean                 1 / tokens
    grpo        -min(r A, clip(r, 0.8, 1.2) A) + 0.04 k3    (reward - mean) / std         mean in rollouts
    dr_grpo     -min(r A, clip(r, 0.8, 1.2) A)              reward - mean                 1 / (rollouts x L)
    dapo        -min(r A, clip(r, 0.8, 1.28) A)             (reward - mean) / std         1 / tokens
    gspo        -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)    (reward - mean) / std         mean in rollouts
    cispo       -stop_gradient(clip(r, 0, 5)) A log p       (reward - mean) / std         1 / tokens
    rloo        -A log p                                    reward - mean of the others   1 / rollouts
    reinforce   -A log p                                    reward                        1 / rollouts
    ppo         -min(r A, clip(r, 0.8, 1.2) A)              of the critic, per token      1 / tokens

    s = exp(mean over the sequence of (new - old))

`recipe` takes the group mean alone from Dr. GRPO and the token mean from DAPO. Deviations divide by n-1. A
sequence is a token row: if a history was rewritten, each row of the rollout has its own ratio. Importance
weights for the sampler (`tis_cap`) are on in all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nano_rl.learn.config import Objective

if TYPE_CHECKING:
    from torch import Tensor


def clipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective) -> Tensor:
    """[N] loss of each token: -min(r A, clip(r, 1 - low, 1 + high) A), and for A < 0 at most c |A|. Schulman
    et al. 2017 (arXiv 1707.06347); separate bounds: DAPO (arXiv 2503.14476); dual clip: Ye et al. 2020 (arXiv
    1912.09729). `new_N` is not read but through the ratio."""
    bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss_N = -(ratio_N * advantages_N).minimum(bounded_N * advantages_N)
    if config.dual_clip is None:
        return loss_N
    # has no effect for A > 0, where the loss is negative
    return loss_N.minimum(config.dual_clip * advantages_N.abs())


def weighted(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective) -> Tensor:
    """[N] loss of each token: the clamped ratio is a weight without gradient, so no token is dropped."""
    weight_N = ratio_N.detach().clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight_N * advantages_N * new_N


def unclipped(new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective) -> Tensor:
    """[N] loss of each token. The ratio is not used: from the second update of a step on, the gradient is
    off-policy without correction."""
    return -advantages_N * new_N


RECIPE = Objective(surrogate=clipped)

GRPO = Objective(surrogate=clipped, std="sample", aggregation="sequence", beta=0.04)
"""arXiv 2402.03300, which specifies neither the clip nor whether the deviation divides by n or n-1"""

DR_GRPO = Objective(surrogate=clipped, aggregation="constant")
"""arXiv 2503.20783: neither the deviation nor the length divides; L is `constant_length`"""

DAPO = Objective(surrogate=clipped, std="sample", clip_high=0.28)
"""arXiv 2503.14476; its dynamic sampling is `refill`, its overlong penalty `overlong` = shape"""

GSPO = Objective(
    surrogate=clipped, std="sample", ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence"
)
"""arXiv 2507.18071"""

CISPO = Objective(surrogate=weighted, std="sample", clip_low=1.0, clip_high=4.0)
"""arXiv 2506.13585, which bounds the weight from above only, by a tuned constant: here 1 + 4 = 5"""

_REINFORCE = Objective(
    surrogate=unclipped, clips=False, aggregation="constant", constant_length=1, kl="k1",
    kl_in="reward",
)  # fmt: skip

RLOO = _REINFORCE.with_terms(baseline="rloo")
"""arXiv 2402.14740; KL, if any, is subtracted from the reward"""

REINFORCE = _REINFORCE.with_terms(baseline="none")
"""Williams 1992"""

PPO = Objective(surrogate=clipped, critic=True, baseline="none", kl="k1", kl_in="reward")
"""arXiv 1707.06347; rewards are not compared within groups"""
