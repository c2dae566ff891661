"""Dr. GRPO: neither the deviation nor the length divides (arXiv 2503.20783).

    A_i = r_i - mean                loss = sum over tokens of -min(r A, clip(r) A) / (rollouts x L)

L is the token budget of a rollout: set `constant_length`.
"""

from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.clip import clipped

DR_GRPO = Objective(
    surrogate=clipped,
    defaults={
        "baseline": "mean", "std": "none", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2,
        "aggregation": "constant", "beta": 0.0,
    },
    fixed=("baseline", "std", "ratio", "aggregation"),
)  # fmt: skip
