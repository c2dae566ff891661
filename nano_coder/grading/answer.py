"""Grading a submitted answer: compared as text, or as JSON where both are JSON."""

from __future__ import annotations

import json

from nano_coder.grading.compare import same_value
from nano_shared.hashing import content_hash
from nano_shared.types import HiddenChecks, Trust, Verdict


def grade_answer(checks: HiddenChecks, answer: str | None, *, grader: str) -> Verdict:
    right = answer is not None and _same(answer, checks.answer)
    return Verdict(
        reward=float(right),
        components={"answer": float(right)},
        checks={"answer": "pass" if right else "fail"},
        failure_kind=None if answer is not None else "no_answer",
        trust=Trust.HIDDEN,
        grader=grader,
        graded_hash=content_hash(answer or ""),
    )


def _same(answer: str, expected: object) -> bool:
    written = expected if isinstance(expected, str) else json.dumps(expected)
    if answer.strip() == written.strip():
        return True
    try:
        return same_value(json.loads(answer), json.loads(written))
    except (json.JSONDecodeError, RecursionError):
        return False
