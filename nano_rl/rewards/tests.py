"""`tests`: the outcome, as the grader computed it outside the agent's reach."""

from __future__ import annotations

from nano_coder.runtime import Runtime
from nano_rl.rewards.outcome import outcome
from nano_rl.rewards.part import Part, Score
from nano_shared.types import Trajectory, Verdict


class Tests(Part):
    alone = True
    __test__ = False  # no test class, whatever pytest thinks of its name

    fraction: bool = False
    """count the share of checks that passed, not only all of them"""

    def outcome(self, verdict: Verdict | None) -> float | None:
        """Between 0 and 1; 1 only where the grader's own reward is. None where nothing was graded."""
        value = outcome(verdict)
        if not self.fraction or verdict is None or verdict.tampering or value in (None, 1.0):
            return value
        share = sum(check == "pass" for check in verdict.checks.values()) / max(1, len(verdict.checks))
        return share if share < 1 else value

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        return Score(value=self.outcome(run.verdict))
