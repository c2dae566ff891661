"""PPO: the clipped surrogate under a critic's advantages, one a token (arXiv 1707.06347).

    loss = mean over tokens of -min(r A, clip(r, 0.8, 1.2) A)           A from the critic, per token

Rewards are not compared within groups. KL, if any, is subtracted from the reward as k1.
"""

from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.clip import clipped

PPO = Objective(
    surrogate=clipped,
    defaults={
        "baseline": "none", "std": "none", "ratio": "token", "clip_low": 0.2, "clip_high": 0.2,
        "aggregation": "token", "beta": 0.0, "kl": "k1", "kl_in": "reward",
    },
    fixed=("baseline", "std", "ratio"),
)  # fmt: skip
