"""Hacking over a training: tamper findings by kind, and the pass rate on impossible controls, by steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nano_rl.checkpoints.statistics import wilson
from nano_rl.controls import TAMPERING
from nano_rl.metrics import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class HackRow:
    """What was found in a range of steps."""

    first_step: int
    last_step: int
    rollouts: int
    tampered: int
    """rollouts with any finding"""
    kinds: dict[str, int]
    """kind of tampering -> rollouts that showed it, controls among them"""
    controls: int
    """impossible rollouts that were graded"""
    passes: int
    """of those, passed: each is a proven hack"""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the pass rate on controls."""
        return wilson(self.passes, self.controls)


def hack_rows(metrics: Sequence[Row], *, at_most: int = 20) -> list[HackRow]:
    """The steps of a training in at most that many rows, in order."""
    size = max(1, -(-len(metrics) // at_most))
    return [hack_row(metrics[i : i + size]) for i in range(0, len(metrics), size)]


def hack_row(metrics: Sequence[Row]) -> HackRow:
    """All of these steps together. Steps of a nano that did not count hacks count none."""

    def total(name: str) -> int:
        return int(sum(row.get(name) or 0 for row in metrics))

    kinds: Counter[str] = Counter()
    for row in metrics:
        for name, value in row.items():
            if name.startswith(TAMPERING):
                kinds[name.removeprefix(TAMPERING)] += int(value or 0)
    return HackRow(
        first_step=int(metrics[0].get("step") or 0),
        last_step=int(metrics[-1].get("step") or 0),
        rollouts=total("rollouts"),
        tampered=total("tampered"),
        kinds=dict(kinds.most_common()),
        controls=total("controls_graded"),
        passes=total("control_passes"),
    )
