"""`visible_tests`: the check that the agent could see, run again on the original tests plus its changes."""

from __future__ import annotations

from nano_coder.runtime import Runtime, grade_trajectory
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared.types import Trajectory


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
