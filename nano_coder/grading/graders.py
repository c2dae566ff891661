"""Graders by name: one way to find the facts, and several to make a reward of them."""

from __future__ import annotations

from collections.abc import Callable

from nano_coder.grading.version import GRADER
from nano_shared.errors import UsageError
from nano_shared.types import Verdict


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
    """The whole name of a grader: by it, or by its last word. Raises UsageError for what is none."""
    if name is None:
        return GRADER
    found = [known for known in GRADERS if name in (known, known.removeprefix(GRADER).strip())]
    if not name or not found:
        raise UsageError(f"unknown grader {name!r}; known: {', '.join(map(repr, GRADERS))}")
    return found[0]


def by_grader(name: str, verdict: Verdict) -> Verdict:
    """The verdict as the grader of that name gives it."""
    return GRADERS[name][0](verdict).model_copy(update={"grader": name})
