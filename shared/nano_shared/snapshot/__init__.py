"""Content-addressed snapshots of a workspace, kept in the blob store and outside the user's git.

`snapshot_directory` and `snapshot_tar` take one, `materialise` lays one down in an empty folder, `diff`
shows what two have between them, `apply` brings a change to the folder that it was made for, and `undo`
takes one back from whichever of its stages the folder is at.
"""

from nano_shared.snapshot.apply import apply, undo
from nano_shared.snapshot.capture import Quota, materialise, snapshot_directory, snapshot_tar, snapshot_texts
from nano_shared.snapshot.tree import (
    DEFAULT_EXCLUDES,
    MAX_BYTES,
    MAX_ENTRIES,
    Conflict,
    Entry,
    Kind,
    Snapshot,
    SnapshotError,
    changed_paths,
    copy,
    load,
)
from nano_shared.snapshot.unified import diff

__all__ = [
    "Conflict",
    "DEFAULT_EXCLUDES",
    "Entry",
    "Kind",
    "MAX_BYTES",
    "MAX_ENTRIES",
    "Quota",
    "Snapshot",
    "SnapshotError",
    "apply",
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
