"""Taking a directory back through the stages of a change: `apply` with the snapshots exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nano_shared.blobs import BlobStore
from nano_shared.snapshot.apply import apply
from nano_shared.snapshot.tree import Conflict, Snapshot, differing_paths, load


def undo(
    stages: Sequence[str | Snapshot], target: str | Snapshot, blobs: BlobStore, directory: Path
) -> list[str]:
    """Take `directory` back to `target` from the first of `stages` that it is at; give the paths it changed.

    `stages`, newest first, are the snapshots that came after `target`. A directory is at one where every
    path that any of them changed is as that one (or already as `target`) has it: so a directory that was
    taken back to the middle, or got an unfinished change, is taken back from there. Raises as apply does:
    Conflict names the paths that are unlike the newest, and nothing is touched.
    """
    known, after = [load(stage, blobs) for stage in stages], load(target, blobs)
    touched = {path for stage in known for path in differing_paths(stage, after)}
    for stage in known:
        try:
            return apply(stage, after, blobs, directory, guard=touched)
        except Conflict:
            continue
    return apply(known[0], after, blobs, directory) if known else []
