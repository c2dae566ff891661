"""Size of a rollout: `length` (sampled tokens) and `diff_size` (changed lines); less scores higher.

Also the files that a run changed, before and after, read from its snapshots.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from nano_coder.run.execution import Runtime
from nano_rl.rewards.reward import SILENT, Part, Score
from nano_shared import snapshot
from nano_shared.snapshot import BlobStore, EntryKind, Snapshot
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True)
class FileChange:
    """The text of one file before and after a run."""

    before: str | None
    """None if the file is new"""
    after: str | None
    """None if the file was deleted"""

    @property
    def added_lines(self) -> list[str]:
        old = set((self.before or "").splitlines())
        return [line for line in (self.after or "").splitlines() if line not in old]


def changes(run: Trajectory, blobs: BlobStore) -> Mapping[str, FileChange]:
    """Path -> change, for each regular file that differs between the first and last snapshot of a run."""
    if run.snapshot is None or run.last_snapshot is None:
        return {}
    before, after = snapshot.load(run.snapshot, blobs), snapshot.load(run.last_snapshot, blobs)
    found = {
        path: FileChange(_text(before, path, blobs), _text(after, path, blobs))
        for path in snapshot.changed_paths(before, after)
    }
    return {path: change for path, change in found.items() if change != FileChange(None, None)}


def _text(tree: Snapshot, path: str, blobs: BlobStore) -> str | None:
    entry = tree.by_path.get(path)
    if entry is None or entry.kind is not EntryKind.FILE or entry.content is None:
        return None
    return blobs.get(entry.content).decode("utf-8", "replace")


class Length(Part):
    free: int = Field(0, ge=0)
    """sampled tokens that cost nothing"""
    at_most: int | None = Field(None, ge=1)
    """sampled tokens at which the score is 0; None is the task's own limit"""

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """1 up to `free` sampled tokens, falling linearly to 0 at `at_most`; no score without tokens."""
        if not run.has_tokens:
            return SILENT
        limit = self.at_most or run.task.limits.max_tokens
        return Score(value=falling(run.num_sampled_tokens, self.free, limit))


def falling(amount: float, free: float, at_most: float) -> float:
    """1 up to `free`, 0 from `at_most` on, linear in between."""
    if amount <= free:
        return 1.0
    return max(0.0, (at_most - amount) / (at_most - free)) if at_most > free else 0.0


_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class DiffSize(Part):
    free: int = Field(10, ge=0)
    """changed lines that cost nothing"""
    at_most: int = Field(200, ge=1)
    """changed lines at which the score is 0"""

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        return Score(value=falling(changed_lines(run.diff), self.free, self.at_most))


def changed_lines(diff: str) -> int:
    """The number of lines that a unified diff adds and removes. Hunks are read by their lengths, so that
    changed lines that look like a header are counted."""
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
