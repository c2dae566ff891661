"""Content-addressed snapshots of a workspace, kept in the blob store and outside the user's git.

`snapshot_directory` and `snapshot_tar` take one, `materialise` writes one into an empty folder, `diff`
compares two, `apply` brings a change to the folder that it was made for, and `undo` takes it back, also from
an intermediate stage.
"""

from nano_shared.snapshot.apply import apply, undo
from nano_shared.snapshot.capture import Quota, materialise, snapshot_directory, snapshot_tar, snapshot_texts
from nano_shared.snapshot.tree import (
    DEFAULT_EXCLUDES,
    MAX_BYTES,
    MAX_ENTRIES,
    Conflict,
    Entry,
    EntryKind,
    Snapshot,
    SnapshotError,
    blobs_of,
    changed_paths,
    copy,
    load,
)
from nano_shared.snapshot.unified import diff

__all__ = [
    "Conflict",
    "DEFAULT_EXCLUDES",
    "Entry",
    "EntryKind",
    "MAX_BYTES",
    "MAX_ENTRIES",
    "Quota",
    "Snapshot",
    "SnapshotError",
    "apply",
    "blobs_of",
    "changed_paths",
    "copy",
    "diff",
    "load",
    "materialise",
    "snapshot_directory",
    "snapshot_tar",
    "snapshot_texts",
    "undo",
]
