"""When the rollouts of a step may begin, so that no token is too old when it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pacing:
    """Steps are trained in order, step k by policy version k (counted from the start of the training), and
    its rollouts sample with the newest version at each turn.

    So a step may begin at version k - bound: none of its tokens is more than `bound` versions old when it is
    trained, however long it waits. Nothing has to be discarded, and at most bound + 1 steps are under way.
    """

    bound: int
    """largest number of updates between sampling and training of a token"""
    steps: int
    """of the training"""
    begun: int = 0
    """steps below this have begun"""
    version: int = field(default=-1, init=False)

    def advance(self, version: int) -> Iterator[int]:
        """The steps that may begin with this version, in order. Raises ValueError if it goes back."""
        if version < self.version:
            raise ValueError(f"version {version} after version {self.version}")
        self.version = version
        self.begun = max(self.begun, version)
        while self.begun < min(self.steps, version + self.bound + 1):
            self.begun += 1
            yield self.begun - 1
