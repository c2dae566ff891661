"""The agent's workspace: a chain of content-addressed snapshots, taken inside the jail."""

from __future__ import annotations

from nano_coder.sandbox.protocol import Jail
from nano_shared import snapshot, snapshot_change
from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.snapshot import MAX_BYTES, Quota, Snapshot, shown
from nano_shared.types import Trajectory

WORKSPACE_LOST = "the workspace that it left cannot be kept"
"""detail of the end of such a run"""


def workspace_after(trajectory: Trajectory, step: int | None) -> str:
    """Snapshot after a step: 1 is the first turn, 0 the start, None the last logged turn.

    Raises UsageError for a step that the run does not have, and for a run without a workspace.
    """
    run, count = trajectory.id, len(trajectory.turns)
    if trajectory.snapshot is None:
        raise UsageError(f"run {run} never got a workspace: there is nothing that it changed")
    if step is not None and not 0 <= step <= count:
        steps = f"steps 1 to {count}, and 0 for the start" if count else "no steps, only 0 for the start"
        raise UsageError(f"run {run} has no step {step}: it has {steps}")
    turns = trajectory.turns[:step]
    return next((turn.snapshot for turn in reversed(turns) if turn.snapshot), trajectory.snapshot)


def workspaces_since(trajectory: Trajectory, step: int) -> list[str]:
    """Snapshots after the turns that follow a step, newest first, without repetitions."""
    found = (turn.snapshot for turn in reversed(trajectory.turns[step:]) if turn.snapshot)
    return list(dict.fromkeys(found))


class Workspace:
    """The workspace of one jail. `start` is the snapshot before the first action, `snapshot` the newest."""

    def __init__(
        self, jail: Jail, blobs: BlobStore, *, start: str, snapshot: str, most_mb: int | None = None
    ) -> None:
        """`most_mb`: largest size, MB; None is the default of snapshots."""
        self._jail = jail
        self._blobs = blobs
        self.start = start
        self.snapshot = snapshot
        self.lost = False
        """True if no snapshot can be taken of the workspace after the last change"""
        self.left_out: tuple[str, ...] = ()
        """paths that the newest snapshot leaves out: pipes, sockets, devices, and what cannot be read"""
        self._most = MAX_BYTES if most_mb is None else most_mb << 20
        self._quota = Quota(2 * self._most)

    def refresh(self) -> tuple[str, ...]:
        """Take a snapshot and return the files that changed since the last one.

        Raises SnapshotError if the workspace is too large or unreadable, which the agent can repair.
        """
        self.lost = True
        before = snapshot.load(self.snapshot, self._blobs)
        self.snapshot = self._take(before)
        self.lost = False
        return tuple(map(shown, snapshot.changed_paths(before, snapshot.load(self.snapshot, self._blobs))))

    def files(self) -> list[str]:
        """Paths of the regular files in the starting snapshot."""
        return snapshot.load(self.start, self._blobs).shown_files

    def diff(self) -> str:
        """Unified diff of all changes of the agent."""
        if self.start == self.snapshot:
            return ""
        return snapshot_change.diff(
            snapshot.load(self.start, self._blobs), snapshot.load(self.snapshot, self._blobs), self._blobs
        )

    def _take(self, before: Snapshot) -> str:
        left_out: list[str] = []
        taken = snapshot.snapshot_tar(
            self._jail.snapshot(),
            self._blobs,
            max_bytes=self._most,
            quota=self._quota,
            before=before,
            left_out=left_out.append,
        )
        self.left_out = tuple(map(shown, left_out))
        return taken
