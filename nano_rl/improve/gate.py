"""The gate: whether a candidate is promoted for a project, and whether a promoted one is taken back.

The policy before the cycle and the candidate run the held-out tasks of the project, paired; success is
compared over places (`sign_flip`). Cycle k may be wrong with probability 0.05 * 6 / (pi^2 k^2), which sums to
0.05 over all cycles (the spending of Foster and Stine 2008, "alpha-investing", without earning), so that a
policy that does not change is promoted in at most one project of twenty, however often it is tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from nano_rl.checkpoints.promotion import SuccessDifference
from nano_shared.types import Value

ERROR = 0.05
"""probability of a wrong promotion, over all cycles of a project; and of a wrong roll-back, over all runs"""
FEWEST_PLACES = 30
"""held-out places below which nothing is promoted by itself"""
MARGIN = 0.05
"""largest fall of the success rate on the general tasks"""


def error_of(cycle: int) -> float:
    """The error that cycle `cycle`, from 1, may spend."""
    return ERROR * 6 / (math.pi * cycle) ** 2


class GateDecision(Value):
    cycle: int
    held_out: SuccessDifference
    general: SuccessDifference | None
    """None: no general tasks, since their suites are not installed"""
    objections: tuple[str, ...]

    @property
    def promoted(self) -> bool:
        return not self.objections


def decide(cycle: int, held_out: SuccessDifference, general: SuccessDifference | None) -> GateDecision:
    """Judge a cycle by the paired differences (candidate - before) on held-out and on general tasks."""
    level, found = error_of(cycle), list[str]()
    places = held_out.clusters or 0
    if places < FEWEST_PLACES:
        found.append(
            f"{places} held-out places are too few for a promotion without you, which takes {FEWEST_PLACES}"
        )
    if held_out.mean <= 0 or held_out.p_better > level:
        found.append(
            f"not better on the held-out tasks beyond noise: {held_out.mean:+.1%}, p {held_out.p_better:.4f},"
            f" where cycle {cycle} takes {level:.4f}"
        )
    if general is not None and general.mean < -MARGIN:
        found.append(f"worse on the general tasks: {general.mean:+.1%}, where -{MARGIN:.0%} is allowed")
    return GateDecision(cycle=cycle, held_out=held_out, general=general, objections=tuple(found))


def evidence_of_fall(before: Sequence[bool], after: Iterable[bool]) -> list[float]:
    """[pairs] e-values that ordinary runs pass more rarely after a promotion than before it.

    Each run after is paired with one before, the newest first; of the pairs that differ, at most one half is
    expected to be (passed, failed) unless the rate has fallen. The evidence is a bet on that, of every share
    between one half and one alike (a mixture of betting martingales, Waudby-Smith and Ramdas 2024): it
    exceeds 1/0.05 at any time with probability 0.05 at most if the rate has not fallen (Ville), so that it
    may be looked at after every run. It ends where the runs before are used up.
    """
    worse = better = 0
    evidence, shares = [], [0.5 + (step + 0.5) / 200 for step in range(100)]
    for passed_before, passed_after in zip(reversed(before), after, strict=False):
        worse += passed_before and not passed_after
        better += passed_after and not passed_before
        ratios = ((2 * q) ** worse * (2 * (1 - q)) ** better for q in shares)
        evidence.append(math.fsum(ratios) / len(shares))
    return evidence


def fallen(before: Sequence[bool], after: Iterable[bool]) -> int | None:
    """The number of runs after which a fall was beyond doubt; None: it is not."""
    evidence = evidence_of_fall(before, after)
    return next((n for n, value in enumerate(evidence, 1) if value >= 1 / ERROR), None)
