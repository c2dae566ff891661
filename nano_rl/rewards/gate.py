"""The gate: what each part of a reward counts, given the outcome.

Shaping that is added to the outcome directly makes training collapse; counted only once the outcome gate is
met, it does not (gated reward accumulation). Below the gate it counts nothing, or breaks ties within less
than the smallest step between two outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

TESTS = "tests"
MIDDLE = 0.5
"""counts for a part that has nothing to say: neither for the rollout nor against it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How the parts of a reward count together."""

    weights: Mapping[str, float]
    """part -> its share; they add up to 1"""
    threshold: float = 1.0
    """outcome from which shaping counts"""
    tie_break: float = 0.0
    """below the threshold: share of the smallest outcome step that all shaping together may move"""

    @classmethod
    def of(cls, weights: Mapping[str, float], *, threshold: float = 1.0, tie_break: float = 0.0) -> Gate:
        """Scale the weights to a sum of 1. Raises ValueError where they have no positive, finite sum."""
        total = math.fsum(weights.values())
        if not (math.isfinite(total) and total > 0) or any(w < 0 for w in weights.values()):
            raise ValueError(f"weights must be at least 0 with a positive, finite sum, not {dict(weights)}")
        scaled = {name: weight / total for name, weight in weights.items()}
        return cls(weights=scaled, threshold=threshold, tie_break=tie_break)

    def is_open(self, outcome: float | None) -> bool:
        """Whether shaping counts in full. A reward without tests has no gate."""
        return TESTS not in self.weights or (outcome is not None and outcome >= self.threshold)

    def counted(
        self, outcome: float | None, scores: Mapping[str, float | None], *, step: float = 1.0
    ) -> dict[str, float | None]:
        """Part -> what counts of its score, between 0 and 1; None where it has nothing to say.

        `step` is the smallest difference between two outcomes that are compared; it bounds tie-breaks.
        """
        is_open = self.is_open(outcome)
        scale = 1.0 if is_open else self._tie_scale(step)
        values: dict[str, float | None] = {}
        for name in self.weights:
            score = outcome if name == TESTS else scores.get(name)
            if name == TESTS or (score is None and is_open):
                values[name] = score
            else:
                values[name] = scale * _or_middle(score)
        return values

    def total(self, counted: Mapping[str, float | None]) -> float:
        """The reward: the weighted sum of what counts."""
        return math.fsum(w * _or_middle(counted[name]) for name, w in self.weights.items())

    def _tie_scale(self, step: float) -> float:
        tests = self.weights.get(TESTS, 0.0)
        shaping = math.fsum(w for name, w in self.weights.items() if name != TESTS)
        return min(1.0, self.tie_break * step * tests / shaping) if shaping > 0 else 0.0


def smallest_step(outcomes: Iterable[float | None]) -> float:
    """The smallest difference between two of the outcomes, fail (0) and pass (1) among them."""
    values = sorted({0.0, 1.0, *(o for o in outcomes if o is not None)})
    return min(b - a for a, b in pairwise(values))


def _or_middle(value: float | None) -> float:
    return MIDDLE if value is None else value
