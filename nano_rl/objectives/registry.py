"""Every objective by its name. A new one is a new file and one entry here, and a name in the config."""

from __future__ import annotations

from typing import Literal

from nano_rl.objectives.cispo import CISPO
from nano_rl.objectives.dapo import DAPO
from nano_rl.objectives.dr_grpo import DR_GRPO
from nano_rl.objectives.grpo import GRPO
from nano_rl.objectives.gspo import GSPO
from nano_rl.objectives.objective import Objective
from nano_rl.objectives.ppo import PPO
from nano_rl.objectives.recipe import RECIPE
from nano_rl.objectives.reinforce import REINFORCE
from nano_rl.objectives.rloo import RLOO

Name = Literal["recipe", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "ppo"]

OBJECTIVES: dict[Name, Objective] = {
    "recipe": RECIPE,
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce": REINFORCE,
    "ppo": PPO,
}
