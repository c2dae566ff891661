"""Which tasks come next, so that groups have a signal.

A group has a signal if some of its rollouts succeed and some fail. Each cell (a level and a view) has a
decaying estimate p of its success; cells with p between LOW and HIGH are drawn most, in proportion to
p(1 - p), the variance of a rollout's reward. Levels open from the lowest up: the next level opens when the
mean success of the highest open level exceeds the middle of the band, and the highest level closes again when
its success falls below LOW / 2. The same state, seed and step draw the same tasks; the state is plain JSON.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from nano_rl.learn.groups import Group
from nano_shared.errors import UsageError
from nano_shared.types import Task

Cell = tuple[int, str]
"""level, view"""


LOW, HIGH = 0.2, 0.8
"""target band of the success of groups"""
DECAY = 0.8
"""factor by which each new group reduces the weight of earlier groups"""
FLOOR = 0.02
"""weight of a cell outside the band, relative to 1 at p = 0.5: such cells are still sampled now and then"""
TRIES = 3
"""number of groups before the estimate of a cell is used"""


@dataclass(slots=True)
class _CellRecord:
    groups: int = 0
    success: float = 0.0
    """decayed sum of the mean rewards of the groups"""
    weight: float = 0.0
    """decayed number of groups"""
    drawn: int = 0

    @property
    def rate(self) -> float | None:
        return self.success / self.weight if self.weight else None


@dataclass(slots=True)
class Curriculum:
    """Draws tasks from a pool, by the recorded results of earlier groups. Raises UsageError for an empty
    pool, and for a task without a level."""

    tasks: Sequence[Task]
    seed: int = 0
    open_level: int = field(init=False)
    _cells: dict[Cell, list[Task]] = field(init=False)
    _records: dict[Cell, _CellRecord] = field(init=False)

    def __post_init__(self) -> None:
        cells: dict[Cell, list[Task]] = {}
        for task in self.tasks:
            if task.level is None:
                raise UsageError(f"task {task.key!r} has no level, so no curriculum can place it")
            cells.setdefault((task.level, task.view or ""), []).append(task)
        if not cells:
            raise UsageError("a curriculum needs at least one task")
        self._cells = dict(sorted(cells.items()))
        self._records = {cell: _CellRecord() for cell in self._cells}
        self.open_level = self.levels[0]

    @property
    def levels(self) -> list[int]:
        return sorted({level for level, _ in self._cells})

    @property
    def open_cells(self) -> list[Cell]:
        return [cell for cell in self._cells if cell[0] <= self.open_level]

    def weights(self) -> dict[Cell, float]:
        """Sampling weight of each open cell: 1 without an estimate, 4p(1 - p) in the band, FLOOR outside."""
        return {cell: self._weight(self._records[cell]) for cell in self.open_cells}

    def _weight(self, record: _CellRecord) -> float:
        rate = record.rate
        if rate is None or record.groups < TRIES:
            return 1.0
        if not LOW <= rate <= HIGH:
            return FLOOR
        return max(FLOOR, 4 * rate * (1 - rate))

    def draw(self, step: int, count: int, *, taken: Collection[str] = ()) -> list[Task]:
        """`count` different tasks of one step, none with a key in `taken`; fewer if no more are open."""
        rng = Random(f"curriculum {self.seed} {step}" + (f" {len(taken)}" if taken else ""))
        weights = self.weights()
        seen = set(taken)
        chosen: list[Task] = []
        room = sum(t.key not in seen for cell in weights for t in self._cells[cell])
        while len(chosen) < min(count, room):
            left = {c: w for c, w in weights.items() if any(t.key not in seen for t in self._cells[c])}
            cell = rng.choices(list(left), weights=list(left.values()))[0]
            task = self._next(cell)
            while task.key in seen:
                task = self._next(cell)
            chosen.append(task)
            seen.add(task.key)
        return chosen

    def _next(self, cell: Cell) -> Task:
        """The next task of a cell: seeded permutations of its pool, one after the other."""
        record, pool = self._records[cell], self._cells[cell]
        epoch, place = divmod(record.drawn, len(pool))
        order = list(range(len(pool)))
        Random(f"curriculum {self.seed} {cell} {epoch}").shuffle(order)
        record.drawn += 1
        return pool[order[place]]

    def record(self, groups: Sequence[Group]) -> None:
        """Record the groups of a step. Forks and rollouts without a reward are ignored."""
        for group in groups:
            if group.forked:
                continue
            task = group.trajectories[0].task
            scored = [r for r in group.rewards_G if not math.isnan(r)]
            if not scored or task.level is None or (task.level, task.view or "") not in self._records:
                continue
            record = self._records[task.level, task.view or ""]
            success = min(1.0, max(0.0, math.fsum(scored) / len(scored)))
            record.groups += 1
            record.success = DECAY * record.success + success
            record.weight = DECAY * record.weight + 1
        self._move()

    def _move(self) -> None:
        top = [self._records[cell] for cell in self._cells if cell[0] == self.open_level]
        known = [r.rate for r in top if r.rate is not None and r.groups >= TRIES]
        if len(known) < len(top):
            return
        mean = sum(known) / len(known)
        at = self.levels.index(self.open_level)
        if mean > (LOW + HIGH) / 2 and at + 1 < len(self.levels):
            self.open_level = self.levels[at + 1]
        elif mean < LOW / 2 and at > 0:
            for record in top:  # estimates start afresh when the level opens again
                record.groups, record.success, record.weight = 0, 0.0, 0.0
            self.open_level = self.levels[at - 1]

    def metrics(self) -> dict[str, float]:
        """`curriculum_level`, the highest open one, and `curriculum_in_band`, the share of open cells."""
        rates = [r for cell in self.open_cells if (r := self._records[cell].rate) is not None]
        inside = [r for r in rates if LOW <= r <= HIGH]
        return {
            "curriculum_level": float(self.open_level),
            "curriculum_in_band": len(inside) / len(rates) if rates else 0.0,
        }

    def state(self) -> dict[str, Any]:
        return {
            "open_level": self.open_level,
            "cells": [
                [level, view, r.groups, r.success, r.weight, r.drawn]
                for (level, view), r in self._records.items()
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises UsageError if the pool has other levels and views."""
        saved = {(level, view): _CellRecord(*rest) for level, view, *rest in state["cells"]}
        if set(saved) != set(self._cells):
            raise UsageError(
                "the curriculum was saved for tasks of other levels and views; use the same file"
            )
        self._records = {cell: saved[cell] for cell in self._cells}
        self.open_level = int(state["open_level"])
