"""`tests` and `visible_tests`: the outcome of the hidden checks, and of the check that the agent saw."""

from __future__ import annotations

from nano_coder.grading.grade import grade_trajectory
from nano_coder.run.execution import Runtime
from nano_coder.verify.trainable import outcome
from nano_rl.rewards.reward import SILENT, Part, Score
from nano_shared.types import Trajectory, Verdict


class VisibleTests(Part):
    costly = True

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """1 if the task's own check passes in a fresh jail, else 0; no score if the task has none."""
        if run.task.check is None:
            return SILENT
        visible = run.model_copy(update={"task": run.task.model_copy(update={"hidden": None})})
        verdict = grade_trajectory(visible, runtime.sandbox, runtime.store.blobs)
        if verdict is None or verdict.reward is None:
            return Score(value=None, failure="visible_tests_failed_to_run")
        return Score(value=0.0 if verdict.tampering else verdict.reward)


class Tests(Part):
    alone = True
    __test__ = False  # not a pytest test class

    fraction: bool = False
    """use the share of passed checks instead of 1 or 0"""

    def outcome(self, verdict: Verdict | None) -> float | None:
        """The outcome between 0 and 1; 1 only if the grader's reward is 1; None if nothing was graded."""
        value = outcome(verdict)
        if not self.fraction or verdict is None or verdict.tampering or value in (None, 1.0):
            return value
        share = sum(check == "pass" for check in verdict.checks.values()) / max(1, len(verdict.checks))
        return share if share < 1 else value

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        return Score(value=self.outcome(run.verdict))
