"""Laying a snapshot down in an empty folder."""

from __future__ import annotations

import os
from pathlib import Path

from nano_shared.blobs import BlobStore
from nano_shared.full_disk import full_disk_explained
from nano_shared.snapshot.tree import Kind, Snapshot, SnapshotError, load


def materialise(snapshot: str | Snapshot, blobs: BlobStore, directory: Path) -> None:
    """Write every entry under `directory`, which is made if it does not exist, with exact modes.

    Raises SnapshotError when the directory holds something, LogError when a blob is missing or corrupt.
    """
    tree = load(snapshot, blobs)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise SnapshotError(f"{directory} is not empty; a snapshot is restored into a new or empty directory")
    with full_disk_explained(directory):
        for entry in tree.entries:
            target = os.path.join(directory, entry.path)
            if entry.kind is Kind.DIRECTORY:
                os.mkdir(target, 0o700)
            elif entry.kind is Kind.SYMLINK:
                os.symlink(str(entry.content), target)
            else:
                _write(target, blobs.get(str(entry.content)), entry.mode)
    # Last and from the leaves up: a read-only directory would have refused its own content.
    for entry in reversed(tree.entries):
        if entry.kind is Kind.DIRECTORY:
            os.chmod(os.path.join(directory, entry.path), entry.mode)


def _write(target: str, data: bytes, mode: int) -> None:
    with open(target, "xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
