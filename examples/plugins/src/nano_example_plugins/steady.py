"""The recipe with a KL that is held near a target, and an entropy that is held above one."""

from nano_rl.learn.config import Objective
from nano_rl.learn.objectives.clip import clipped
from nano_rl.learn.objectives.controls import AdaptiveKL, EntropyTarget, ReferenceRefresh, TemperatureSchedule

STEADY = Objective(
    surrogate=clipped,
    defaults={"beta": 0.05},
    controls=(
        TemperatureSchedule(start=1.2, end=1.0, steps=20),
        EntropyTarget(target=0.3, rate=0.005),
        AdaptiveKL(target=0.02, gain=0.1),
        ReferenceRefresh(every=50),
    ),
)
