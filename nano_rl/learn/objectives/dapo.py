"""DAPO: the upper bound higher than the lower, a mean over all tokens, no KL (arXiv 2503.14476).

    A_i = (r_i - mean) / std        loss = mean over tokens of -min(r A, clip(r, 0.8, 1.28) A)

The other two parts of the paper are separate settings: the overlong penalty is `overlong = shape` with your
lengths, and dynamic sampling is `refill`.
"""

from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.clip import clipped

DAPO = Objective(
    surrogate=clipped,
    defaults={
        "baseline": "mean", "std": "sample", "ratio": "token", "clip_low": 0.2, "clip_high": 0.28,
        "aggregation": "token", "beta": 0.0,
    },
    fixed=("baseline", "ratio", "aggregation"),
)  # fmt: skip
