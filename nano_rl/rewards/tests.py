"""`tests`: the outcome, as the grader computed it outside the agent's reach."""

from __future__ import annotations

from nano_coder.grading.submission import grade_trajectory
from nano_coder.run.execution import Runtime
from nano_rl.rewards.outcome import outcome
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared.types import Trajectory, Verdict


class VisibleTests(Part):
    costly = True

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """1 where the task's own check passes in a fresh jail; silent where the task has none."""
        if run.task.check is None:
            return SILENT
        visible = run.model_copy(update={"task": run.task.model_copy(update={"hidden": None})})
        verdict = grade_trajectory(visible, runtime.sandbox, runtime.store.blobs)
        if verdict is None or verdict.reward is None:
            return Score(value=None, failure="visible_tests_failed_to_run")
        return Score(value=0.0 if verdict.tampering else verdict.reward)


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
