"""An objective: the loss of each token, and the settings that go with it. Importing it loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nano_rl.learn.objectives import Objective

if TYPE_CHECKING:
    from torch import Tensor


def squashed(
    new_N: Tensor, ratio_N: Tensor, advantages_N: Tensor, config: Objective, reference_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] the ratio's distance from 1, squashed instead of clipped."""
    loss_N = -advantages_N * (ratio_N - 1).tanh()
    return loss_N, {"drift": new_N - reference_N}  # the metric objective_drift


TANH = Objective(surrogate=squashed, baseline="mean", std="none", clips=False)
