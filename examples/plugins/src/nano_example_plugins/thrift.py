"""A part of a reward: settings, and a score between 0 and 1 for a rollout."""

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_rl.rewards.reward import Part, Score
from nano_shared.types import Trajectory


class Thrift(Part):
    at_most: int = Field(8, ge=1)
    """turns at which the score is 0"""

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """1 for a rollout of one turn, falling to 0."""
        return Score(value=max(0.0, 1 - (len(run.turns) - 1) / self.at_most))
