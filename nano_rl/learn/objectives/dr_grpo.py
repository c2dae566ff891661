"""Dr. GRPO: neither the deviation nor the length divides (arXiv 2503.20783).

    A_i = r_i - mean                loss = sum over tokens of -min(r A, clip(r) A) / (rollouts x L)

L is a constant, the budget of tokens of a rollout: set `constant_length` to yours.
"""

from nano_rl.learn.config.objective import Objective
from nano_rl.learn.objectives.clip import clipped

DR_GRPO = Objective(
    surrogate=clipped,
    defaults={
        "baseline": "mean", "std": "none", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2,
        "aggregation": "constant", "beta": 0.0,
    },
    fixed=("baseline", "std", "ratio", "aggregation"),
)  # fmt: skip
