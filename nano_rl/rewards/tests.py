"""`tests`: the outcome of the grader alone; `visible_tests`: the task's own check, which agents can run."""

from __future__ import annotations

from nano_coder.grading.grade import grade_trajectory
from nano_coder.run.execution import Runtime
from nano_rl.rewards.part import SILENT, Part, Score
from nano_shared.types import Trajectory, Verdict

REWARD = "nano-reward 1"
"""name and version of the composition, appended to the grader of a composed verdict"""
_JOINT = " + "


def composed_grader(grader: str, recipe: str) -> str:
    """The grader of a composed verdict: the grader's name, and the recipe of the reward."""
    return f"{base_grader(grader)}{_JOINT}{REWARD} {recipe}"


def base_grader(grader: str) -> str:
    return grader.split(f"{_JOINT}nano-reward ")[0]


def is_composed(verdict: Verdict) -> bool:
    return base_grader(verdict.grader) != verdict.grader


def outcome(verdict: Verdict | None) -> float | None:
    """The reward of the tests alone; None if nothing was graded, 0 with tampering.

    For a composed verdict without tests (a judge alone), its reward.
    """
    if verdict is None:
        return None
    value = verdict.components.get("tests", verdict.reward) if is_composed(verdict) else verdict.reward
    return 0.0 if verdict.tampering and value is not None else value


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
