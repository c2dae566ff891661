"""Grading: from what an agent left to a verdict. Answers are computed in a jail and compared outside it."""

from nano_shared.types import Verdict

GRADER = "nano-grader 4"
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
    """The reward of the tests alone; None if nothing was graded, 0 with tampering. For a composed verdict
    without tests (a judge alone), its reward."""
    if verdict is None:
        return None
    value = verdict.components.get("tests", verdict.reward) if is_composed(verdict) else verdict.reward
    return 0.0 if verdict.tampering and value is not None else value
