"""The files a run changed, before and after, read from its snapshots and never from a live workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.snapshot import Kind, Snapshot
from nano_shared.types import Trajectory


@dataclass(frozen=True, slots=True)
class Change:
    before: str | None
    """None: the file is new"""
    after: str | None
    """None: the file was deleted"""

    @property
    def added_lines(self) -> list[str]:
        old = set((self.before or "").splitlines())
        return [line for line in (self.after or "").splitlines() if line not in old]


def changes(run: Trajectory, blobs: BlobStore) -> Mapping[str, Change]:
    """Path -> change, of every regular file that differs between the run's first and last snapshot."""
    if run.snapshot is None or run.last_snapshot is None:
        return {}
    before, after = snapshot.load(run.snapshot, blobs), snapshot.load(run.last_snapshot, blobs)
    found = {
        path: Change(_text(before, path, blobs), _text(after, path, blobs))
        for path in snapshot.changed_paths(before, after)
    }
    return {path: change for path, change in found.items() if change != Change(None, None)}


def _text(tree: Snapshot, path: str, blobs: BlobStore) -> str | None:
    entry = tree.by_path.get(path)
    if entry is None or entry.kind is not Kind.FILE or entry.content is None:
        return None
    return blobs.get(entry.content).decode("utf-8", "replace")
