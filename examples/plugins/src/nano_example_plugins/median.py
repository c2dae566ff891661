"""An advantage: what the rewards of a group become, for each of its rollouts or for each of their turns."""

from collections.abc import Sequence
from statistics import median

from nano_shared.types import Trajectory


def from_median(rewards_G: Sequence[float], runs_G: Sequence[Trajectory]) -> list[float]:
    """[G] reward minus the median, in mean absolute deviations: one lucky rollout moves the others less."""
    middle = median(rewards_G)
    scale = sum(abs(reward - middle) for reward in rewards_G) / len(rewards_G)
    return [(reward - middle) / (scale or 1.0) for reward in rewards_G]
