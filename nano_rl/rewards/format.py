"""`format`: the share of turns whose actions follow the syntax of the dialect."""

from __future__ import annotations

from nano_coder.run.execution import Runtime
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared.types import Trajectory, Turn

REPAIRED = 0.5


class Format(Part):
    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """The mean over turns: 1 if well formed, 0.5 if the parser repaired it, 0 if it could not be
        parsed."""
        if not run.turns:
            return SILENT
        return Score(value=sum(map(_well_formed, run.turns)) / len(run.turns))


def _well_formed(turn: Turn) -> float:
    if turn.parse_error is not None or not turn.calls:
        return 0.0
    return REPAIRED if turn.repairs else 1.0
