"""DAPO: the upper bound higher than the lower, a mean over all tokens, no KL (arXiv 2503.14476).

    A_i = (r_i - mean) / std        loss = mean over tokens of -min(r A, clip(r, 0.8, 1.28) A)

Its other two parts are settings of their own: the soft punishment of long rollouts is `overlong = shape`
with your lengths, and groups without a signal are left out and refilled where groups are gathered.
"""

from nano_rl.learn.config.objective import Objective
from nano_rl.learn.objectives.clip import clipped

DAPO = Objective(
    surrogate=clipped,
    defaults={
        "baseline": "mean", "std": "sample", "ratio": "token", "clip_low": 0.2, "clip_high": 0.28,
        "aggregation": "token", "beta": 0.0,
    },
    fixed=("baseline", "ratio", "aggregation"),
)  # fmt: skip
