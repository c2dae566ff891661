"""What second attempts are worth: success of the first attempts, and with those that read why they failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from nano_coder.runtime import is_reflection
from nano_rl.rewards import outcome
from nano_shared.types import Trajectory, Value


class Worth(Value):
    """Success before and after reflection, over the first attempts that were graded."""

    graded: int
    first: float
    """share of the first attempts that passed"""
    reflected: float
    """the same where a failed run counts as the mean of its second attempts"""

    def __str__(self) -> str:
        return f"solved at first: {self.first:.1%}; with reflection: {self.reflected:.1%} of {self.graded}"


def split_attempts(runs: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
    """First attempts, and second ones."""
    return [r for r in runs if not is_reflection(r)], [r for r in runs if is_reflection(r)]


def worth_of(runs: Sequence[Trajectory]) -> Worth:
    """Of runs as `rollout.collect` returns them; runs without an outcome (failures of ours) are left out."""
    first, second = split_attempts(runs)
    again: dict[str | None, list[float]] = defaultdict(list)
    for run in second:
        if (value := outcome(run.verdict)) is not None:
            again[run.parent].append(float(value == 1.0))
    before = {r.id: float(value == 1.0) for r in first if (value := outcome(r.verdict)) is not None}
    after = [passed or _mean(again.get(run, [])) for run, passed in before.items()]
    return Worth(graded=len(before), first=_mean(list(before.values())), reflected=_mean(after))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
