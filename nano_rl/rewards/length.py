"""`length`: shorter rollouts score higher, from 1 at a free length to 0 at a maximum length."""

from __future__ import annotations

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared.types import Trajectory


class Length(Part):
    free: int = Field(0, ge=0)
    """sampled tokens that cost nothing"""
    at_most: int | None = Field(None, ge=1)
    """sampled tokens at which the score is 0; None is the task's own limit"""

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """1 up to `free` sampled tokens, falling linearly to 0 at `at_most`; no score without tokens."""
        if not run.has_tokens:
            return SILENT
        limit = self.at_most or run.task.limits.max_tokens
        return Score(value=falling(run.num_sampled_tokens, self.free, limit))


def falling(amount: float, free: float, at_most: float) -> float:
    """1 up to `free`, 0 from `at_most` on, linear in between."""
    if amount <= free:
        return 1.0
    return max(0.0, (at_most - amount) / (at_most - free)) if at_most > free else 0.0
