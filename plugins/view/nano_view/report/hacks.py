"""Reward hacking over the steps of a training, from its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.checkpoints.evaluate import wilson
from nano_rl.gather.rollouts import TAMPERING
from nano_rl.learn.metrics import MetricsRow


@dataclass(frozen=True, slots=True, kw_only=True)
class HackRow:
    """Reward hacking in a range of steps."""

    first_step: int
    last_step: int
    rollouts: int
    tampered: int
    """number of rollouts with tampering"""
    kinds: dict[str, int]
    """kind of tampering -> number of rollouts with it, including controls"""
    controls: int
    """number of graded control rollouts"""
    passes: int
    """number of passed control rollouts, each a proven hack"""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the pass rate on controls."""
        return wilson(self.passes, self.controls)


def hack_rows(metrics: Sequence[MetricsRow], *, at_most: int = 20) -> list[HackRow]:
    """The steps of a training in order, in at most `at_most` rows."""
    size = max(1, -(-len(metrics) // at_most))
    return [hack_row(metrics[i : i + size]) for i in range(0, len(metrics), size)]


def hack_row(metrics: Sequence[MetricsRow]) -> HackRow:
    """The steps as one row. Rows of versions of nano that did not record hacking count as 0."""

    def total(name: str) -> int:
        return int(sum(row.get(name) or 0 for row in metrics))

    kinds: Counter[str] = Counter()
    for row in metrics:
        for name, value in row.items():
            if name.startswith(TAMPERING):
                kinds[name.removeprefix(TAMPERING)] += int(value or 0)
    return HackRow(
        first_step=int(metrics[0].get("step") or 0), last_step=int(metrics[-1].get("step") or 0),
        rollouts=total("rollouts"), tampered=total("tampered"), kinds=dict(kinds.most_common()),
        controls=total("controls_graded"), passes=total("control_passes"),
    )  # fmt: skip
