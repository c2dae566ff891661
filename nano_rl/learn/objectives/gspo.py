"""GSPO: one ratio for each sequence, the geometric mean of its tokens' (arXiv 2507.18071).

    s_i = exp(mean over tokens of (new - old))
    loss = mean over sequences of -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A)

A sequence is a token row: if a history was rewritten, each row of the rollout has its own ratio.
"""

from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.clip import clipped

GSPO = Objective(
    surrogate=clipped,
    defaults={
        "baseline": "mean", "std": "sample", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4,
        "aggregation": "sequence", "beta": 0.0,
    },
    fixed=("baseline", "ratio"),
)  # fmt: skip
