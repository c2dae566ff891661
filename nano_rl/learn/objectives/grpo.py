"""GRPO: the group as baseline, a mean over each sequence, and KL in the loss (arXiv 2402.03300).

    A_i = (r_i - mean) / std
    loss = mean over rollouts of mean over tokens of -min(r A, clip(r) A) + 0.04 k3

The paper does not specify the clip (0.2 here) and whether the deviation divides by n or n-1 (n-1 here).
"""

from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.clip import clipped

GRPO = Objective(
    surrogate=clipped,
    defaults={
        "baseline": "mean", "std": "sample", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2,
        "aggregation": "sequence", "beta": 0.04, "kl": "k3", "kl_in": "loss",
    },
    fixed=("baseline", "ratio"),
)  # fmt: skip
