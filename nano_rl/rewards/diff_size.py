"""`diff_size`: smaller changes score higher."""

from __future__ import annotations

import re

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_rl.rewards.length import falling
from nano_rl.rewards.part import Part, Score
from nano_shared.types import Trajectory

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class DiffSize(Part):
    free: int = Field(10, ge=0)
    """changed lines that cost nothing"""
    at_most: int = Field(200, ge=1)
    """changed lines at which the score is 0"""

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        return Score(value=falling(changed_lines(run.diff), self.free, self.at_most))


def changed_lines(diff: str) -> int:
    """The number of lines that a unified diff adds and removes.

    Hunks are read by their lengths, so that changed lines that look like a header are counted.
    """
    count = old = new = 0
    for line in diff.split("\n"):
        if old <= 0 and new <= 0:
            header = _HUNK.match(line)
            if header:
                old, new = (int(n) if n is not None else 1 for n in header.groups())
        elif line.startswith("-"):
            count, old = count + 1, old - 1
        elif line.startswith("+"):
            count, new = count + 1, new - 1
        elif not line.startswith("\\"):
            old, new = old - 1, new - 1
    return count
