"""The outcome of a rollout: what the tests say, whatever a composed reward makes of it."""

from __future__ import annotations

from nano_shared.facts import VerdictFacts
from nano_shared.types import Verdict

REWARD = "nano-reward 1"
"""name and version of the composition, stamped on the verdict behind the grader's"""
_JOINT = " + "


def composed_grader(grader: str, recipe: str) -> str:
    """The name of a composed verdict: the grader's own, and what was composed on top of it."""
    return f"{base_grader(grader)}{_JOINT}{REWARD} {recipe}"


def base_grader(grader: str) -> str:
    return grader.split(f"{_JOINT}nano-reward ")[0]


def is_composed(verdict: Verdict | VerdictFacts) -> bool:
    return base_grader(verdict.grader) != verdict.grader


def outcome(verdict: Verdict | VerdictFacts | None) -> float | None:
    """The reward of the tests alone; None where nothing was graded. Tampering earns 0.

    A composed verdict without tests (a judge alone) has its reward as the outcome.
    """
    if verdict is None:
        return None
    value = verdict.components.get("tests", verdict.reward) if is_composed(verdict) else verdict.reward
    return 0.0 if verdict.tampering and value is not None else value
