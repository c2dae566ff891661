"""RLOO: REINFORCE with the mean of the other rollouts as baseline (arXiv 2402.14740).

    A_i = r_i - mean of the others          loss = mean over rollouts of sum over tokens of -A log p

KL, if any, is subtracted from the reward as k1.
"""

from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.reinforce import NO_RATIO, unclipped

RLOO = Objective(
    surrogate=unclipped,
    defaults={
        "baseline": "rloo", "std": "none", "aggregation": "constant", "constant_length": 1,
        "kl": "k1", "kl_in": "reward",
    },
    fixed=("baseline", "std"),
    unused=NO_RATIO,
)  # fmt: skip
