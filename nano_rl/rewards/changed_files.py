"""The files that a run changed, before and after, read from its snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.snapshot import EntryKind, Snapshot
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
