"""Success by level and by family, in the first and in the last part of a training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nano_rl.checkpoints.statistics import wilson
from nano_rl.watch.rollouts import Rollout

PARTS = 4
"""the first and the last quarter of the steps are compared"""


@dataclass(frozen=True, slots=True)
class Rate:
    successes: int
    graded: int

    @property
    def rate(self) -> float:
        return self.successes / self.graded

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.successes, self.graded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One level, or one family. A rate is None where nothing of it was graded."""

    name: str
    first: Rate | None
    last: Rate | None
    all: Rate


def by_level(steps: Mapping[int, Sequence[Rollout]]) -> list[Part]:
    return _parts(steps, lambda run: None if run.level is None else f"level {run.level}")


def by_family(steps: Mapping[int, Sequence[Rollout]]) -> list[Part]:
    return _parts(steps, lambda run: run.family)


def _parts(steps: Mapping[int, Sequence[Rollout]], name_of: Callable[[Rollout], str | None]) -> list[Part]:
    order = sorted(steps)
    size = max(1, len(order) // PARTS)
    first, last, whole = (_rates(steps, at, name_of) for at in (order[:size], order[-size:], order))
    return [
        Part(name=name, first=first.get(name), last=last.get(name), all=whole[name]) for name in sorted(whole)
    ]


def _rates(
    steps: Mapping[int, Sequence[Rollout]], chosen: Sequence[int], name_of: Callable[[Rollout], str | None]
) -> dict[str, Rate]:
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for step in chosen:
        for run in steps[step]:
            name = name_of(run)
            if name is not None and run.success is not None and not run.control:
                outcomes[name].append(run.success)
    return {name: Rate(sum(passed), len(passed)) for name, passed in outcomes.items()}
