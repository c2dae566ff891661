"""Graders by name, the version of the grader, and the trust of a verdict by the process that decided it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from nano_shared.errors import UsageError
from nano_shared.types import Trust, Verdict

GRADER = "nano-grader 4"


class Decider(StrEnum):
    """The process that decided a check, by what the solution could do to it."""

    APART = "apart"
    """it never loads the solution: what a jail computed is compared outside that jail"""
    SUPERVISED = "supervised"
    """it loads the solution beside the task's tests, under a supervisor that does not"""
    COMMAND = "command"
    """a command that may load the solution, with deciding files taken from the original"""
    AGENT = "agent"
    """a command that rests on a script of the agent's"""
    STRANGER = "stranger"
    """a command that an untrusted project names"""
    NOBODY = "nobody"
    """the check did not run"""


_TRUST = {
    Decider.APART: Trust.HIDDEN, Decider.SUPERVISED: Trust.STRICT, Decider.COMMAND: Trust.USER_CHECK,
    Decider.AGENT: Trust.NONE, Decider.STRANGER: Trust.NONE, Decider.NOBODY: Trust.NONE,
}  # fmt: skip


def trust_of(decider: Decider) -> Trust:
    """The trust of a verdict: HIDDEN only where the deciding process never loads the solution."""
    return _TRUST[decider]


def _outcome(verdict: Verdict) -> Verdict:
    return verdict


def _fraction(verdict: Verdict) -> Verdict:
    score = next(
        (v for v in (verdict.components.get(n) for n in ("tests", "mutants_killed")) if v is not None), None
    )
    if verdict.reward is None or score is None:
        return verdict
    return verdict.model_copy(update={"reward": 0.0 if verdict.tampering else score})


def _gate(verdict: Verdict) -> Verdict:
    spoilt = verdict.tampering and verdict.reward is not None
    return verdict.model_copy(update={"reward": 0.0}) if spoilt else verdict


GRADERS: dict[str, tuple[Callable[[Verdict], Verdict], str]] = {
    GRADER: (_outcome, "1 where every check passes, else 0"),
    f"{GRADER} fraction": (_fraction, "the fraction of checks that pass, 0 with any tampering"),
    f"{GRADER} gate": (_gate, "as the first, but any tampering found earns 0"),
}


def find_grader(name: str | None) -> str:
    """The full name of a grader, from it or from its last word; None: the default. Raises UsageError."""
    if name is None:
        return GRADER
    found = [known for known in GRADERS if name in (known, known.removeprefix(GRADER).strip())]
    if not name or not found:
        raise UsageError(f"unknown grader {name!r}; known: {', '.join(map(repr, GRADERS))}")
    return found[0]


def by_grader(name: str, verdict: Verdict) -> Verdict:
    """The verdict with the reward of the grader of that name."""
    return GRADERS[name][0](verdict).model_copy(update={"grader": name})
