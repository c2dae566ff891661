"""`format`: whether the actions were written as the dialect wants them."""

from __future__ import annotations

from nano_coder.run.execution import Runtime
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared.types import Trajectory, Turn

REPAIRED = 0.5


class Format(Part):
    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """The mean over turns: 1 as written, half where the parser had to repair it, 0 where it could not."""
        if not run.turns:
            return SILENT
        return Score(value=sum(map(_well_formed, run.turns)) / len(run.turns))


def _well_formed(turn: Turn) -> float:
    if turn.parse_error is not None or not turn.calls:
        return 0.0
    return REPAIRED if turn.repairs else 1.0
