"""The agent's workspace as a chain of content-addressed snapshots, taken inside the jail."""

from __future__ import annotations

from nano_coder.sandbox import Jail
from nano_shared import snapshot
from nano_shared.blobs import BlobStore


class Workspace:
    """Follows one jail. `start` is the snapshot before the first action, `snapshot` the newest."""

    def __init__(self, jail: Jail, blobs: BlobStore, *, start: str, snapshot: str) -> None:
        self._jail = jail
        self._blobs = blobs
        self.start = start
        self.snapshot = snapshot

    def refresh(self) -> tuple[str, ...]:
        """Take a snapshot and name the files that changed since the last one."""
        before, self.snapshot = self.snapshot, self._take()
        if before == self.snapshot:
            return ()
        return snapshot.changed_paths(
            snapshot.load(before, self._blobs), snapshot.load(self.snapshot, self._blobs)
        )

    def files(self) -> list[str]:
        """Paths of the regular files in the starting snapshot."""
        return [e.path for e in snapshot.load(self.start, self._blobs).entries if e.kind == "file"]

    def diff(self) -> str:
        """Unified diff of everything the agent changed."""
        if self.start == self.snapshot:
            return ""
        return snapshot.diff(
            snapshot.load(self.start, self._blobs), snapshot.load(self.snapshot, self._blobs), self._blobs
        )

    def _take(self) -> str:
        return snapshot.snapshot_tar(self._jail.snapshot(), self._blobs)
