"""The order of tasks: seeded permutations one after the other, and backoff for tasks without a signal."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from random import Random
from typing import Any


class TaskOrder:
    """Draws tasks in epochs: each task once, in a seeded permutation, before any is repeated."""

    def __init__(self, keys: Sequence[str], seed: int) -> None:
        """`keys` are the distinct names of the tasks."""
        self._keys = tuple(keys)
        self._seed = seed
        self._epoch = -1
        self._left: list[int] = []
        """indices into `keys` that are left in this epoch, in order"""

    def draw(self, count: int, *, taken: Container[str] = ()) -> list[int]:
        """Indices of the next `count` tasks, all different and none in `taken`; fewer if the pool is smaller.

        A task that is passed over because it is taken, or drawn already, comes first in the next draw.
        """
        free = sum(key not in taken for key in self._keys)
        drawn: list[int] = []
        passed: list[int] = []
        while len(drawn) < min(count, free):
            if not self._left:
                self._next_epoch()
            place = self._left.pop(0)
            if place in drawn or self._keys[place] in taken:
                passed.append(place)
            else:
                drawn.append(place)
        self._left = [*passed, *self._left]
        return drawn

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "left": list(self._left)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()` of the same keys and seed."""
        self._epoch, self._left = int(state["epoch"]), [int(place) for place in state["left"]]

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._left = list(range(len(self._keys)))
        Random(f"{self._seed} {self._epoch}").shuffle(self._left)


class TaskBackoff:
    """Exponential backoff of logged tasks: a task whose group had no signal is left out for 1 step, then for
    2, 4, 8 and at most 16, until a group of it has a signal."""

    def __init__(self) -> None:
        self._step = 0
        self._streak: dict[str, int] = {}
        """task -> number of its latest groups in a row without a signal"""
        self._until: dict[str, int] = {}
        """task -> step from which it may be drawn again"""
        self._passed: set[str] = set()
        """tasks whose latest rollouts all earned the full reward"""
        self.any_signal = False
        """True once any group had a signal"""

    @property
    def resting(self) -> set[str]:
        return {key for key, until in self._until.items() if until > self._step}

    def solved(self, keys: Collection[str]) -> int:
        return len(self._passed & set(keys))

    def exhausted(self, keys: Collection[str]) -> bool:
        """True if every task is solved or had no signal in its latest two groups."""
        return all(key in self._passed or self._streak.get(key, 0) > 1 for key in keys)

    def record(self, live: Mapping[str, bool], passed: Collection[str]) -> None:
        """Record a step: whether the group of each task had a signal, and the tasks solved in all
        rollouts."""
        self._step += 1
        for key, has_signal in live.items():
            self._streak[key] = 0 if has_signal else self._streak.get(key, 0) + 1
            self._until[key] = self._step + (1 << min(self._streak[key], 5)) // 2
            self.any_signal |= has_signal
        self._passed = (self._passed - set(live)) | set(passed)

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "streak": dict(self._streak), "until": dict(self._until),
                "passed": sorted(self._passed), "signal": self.any_signal}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step, self.any_signal = state["step"], state["signal"]
        self._streak, self._until = dict(state["streak"]), dict(state["until"])
        self._passed = set(state["passed"])
