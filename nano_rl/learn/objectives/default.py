"""The recipe: GRPO without the deviation, as a mean over all tokens, every setting free.

    A_i = r_i - mean                loss = mean over tokens of -min(r A, clip(r) A)

The group mean alone as in Dr. GRPO (arXiv 2503.20783), the token mean as in DAPO (arXiv 2503.14476).
"""

from nano_rl.learn.config.objective import Objective
from nano_rl.learn.objectives.clip import clipped

RECIPE = Objective(surrogate=clipped)
