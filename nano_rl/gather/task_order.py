"""The order in which tasks come: one seeded permutation after the other, each of them to its end."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from random import Random
from typing import Any


class Order:
    """Hands out the items of a pool so that none is skipped, and none comes again before all have come."""

    def __init__(self, keys: Sequence[str], seed: int) -> None:
        """`keys` name the items, each its own."""
        self._keys = tuple(keys)
        self._seed = seed
        self._epoch = -1
        self._left: list[int] = []
        """places in `keys` still to come in this epoch, in order"""

    def draw(self, count: int, *, taken: Container[str] = ()) -> list[int]:
        """Places of the next `count` items, none twice and none of `taken`; fewer where the pool is smaller.

        Where one epoch ends within a draw, an item of the next that is in it already waits for its turn.
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
        """Go on from `state()` over the same keys and seed."""
        self._epoch, self._left = int(state["epoch"]), [int(place) for place in state["left"]]

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._left = list(range(len(self._keys)))
        Random(f"{self._seed} {self._epoch}").shuffle(self._left)


class Rests:
    """Which tasks of a log rest, since their last groups had no signal: one step, then two, four and so on,
    each time that they come back without one."""

    def __init__(self) -> None:
        self._step = 0
        self._streak: dict[str, int] = {}
        """task -> its last groups in a row without a signal"""
        self._until: dict[str, int] = {}
        """task -> step at which it comes again"""
        self._passed: set[str] = set()
        """tasks all of whose last rollouts earned the most there is"""
        self.signal = False
        """some group had one"""

    @property
    def resting(self) -> set[str]:
        return {key for key, until in self._until.items() if until > self._step}

    def solved(self, keys: Collection[str]) -> int:
        return len(self._passed & set(keys))

    def spent(self, keys: Collection[str]) -> bool:
        """Whether each task had no signal lately: it is solved, or was tried twice."""
        return all(key in self._passed or self._streak.get(key, 0) > 1 for key in keys)

    def record(self, live: Mapping[str, bool], passed: Collection[str]) -> None:
        """The tasks of one step: whether the group of each had a signal, and which were solved throughout."""
        self._step += 1
        for key, has_signal in live.items():
            self._streak[key] = 0 if has_signal else self._streak.get(key, 0) + 1
            self._until[key] = self._step + (1 << min(self._streak[key], 5)) // 2
            self.signal |= has_signal
        self._passed = (self._passed - set(live)) | set(passed)

    def state(self) -> dict[str, Any]:
        return {"step": self._step, "streak": dict(self._streak), "until": dict(self._until),
                "passed": sorted(self._passed), "signal": self.signal}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step, self.signal = state["step"], state["signal"]
        self._streak, self._until = dict(state["streak"]), dict(state["until"])
        self._passed = set(state["passed"])
