"""The order in which tasks come: one seeded permutation after the other, each of them to its end."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
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
