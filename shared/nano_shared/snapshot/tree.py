"""The Snapshot value: sorted entries of files, directories and symlinks; loading and comparing."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.hashing import canonical_json

FORMAT = "nano-snapshot-1"
MODE_BITS = 0o777
"""mode bits that snapshots keep: never setuid"""
MAX_BYTES = 512 * 2**20
MAX_ENTRIES = 200_000
_NAME_BYTES, _PATH_BYTES = 255, 4095  # of Linux
_IMPLIED_MODE = 0o755
_SHOWN = 10

DEFAULT_EXCLUDES = (
    ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", ".pytest_cache",
    ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs", ".ipynb_checkpoints", ".DS_Store",
    ".nano-apply-*", ".nano",
)  # fmt: skip
"""patterns for names of files or folders at any depth: version control, environments and caches"""


class SnapshotError(UsageError):
    """No snapshot can be taken of a workspace or an archive."""


class Conflict(UsageError):
    """Paths have changed since the snapshot was taken. Nothing was touched."""

    def __init__(self, directory: str, paths: tuple[str, ...]) -> None:
        shown = ", ".join(repr(path) for path in paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
        super().__init__(
            f"{directory}: {len(paths)} path{'s' * (len(paths) != 1)} changed since the snapshot: {shown}; "
            "nothing was touched. Put them back, or merge by hand with the run's diff"
        )
        self.paths = paths


class EntryKind(StrEnum):
    FILE = "file"
    DIRECTORY = "dir"
    SYMLINK = "symlink"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    path: str
    """relative, with slashes; bytes that are not UTF-8 as surrogate escapes, as os.fsdecode gives them"""
    kind: EntryKind
    mode: int
    """permission bits; 0 for symlinks"""
    content: str | None
    """blob id of a file, target of a symlink, None for a directory"""

    @property
    def shown(self) -> str:
        """The path as text for logs and prompts: bytes that are not UTF-8 as `\\xff`."""
        return shown(self.path)


@dataclass(frozen=True)
class Snapshot:
    """Entries sorted by path; every ancestor of an entry has an entry too."""

    entries: tuple[Entry, ...]

    @cached_property
    def by_path(self) -> dict[str, Entry]:
        return {entry.path: entry for entry in self.entries}

    def below(self, path: str) -> dict[str, Entry]:
        """The entries of a path and of what is below it, by path."""
        return {entry.path: entry for entry in self.entries if f"{entry.path}/".startswith(f"{path}/")}

    @property
    def shown_files(self) -> list[str]:
        """Paths of the regular files, invalid UTF-8 bytes escaped."""
        return [entry.shown for entry in self.entries if entry.kind is EntryKind.FILE]


def shown(path: str) -> str:
    """A path with invalid UTF-8 bytes escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def clean_path(name: str) -> str:
    """The path without `.` and repeated slashes; empty for the root. Raises SnapshotError if it leads
    outside."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    path = "/".join(parts)
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise SnapshotError(f"path {name!r} leads outside the workspace; paths must be relative")
    encoded = path.encode("utf-8", "surrogateescape")
    if len(encoded) > _PATH_BYTES or any(len(part) > _NAME_BYTES for part in encoded.split(b"/")):
        raise SnapshotError(f"path {name[:80]!r}... is longer than a file system takes")
    return path


def make_snapshot(entries: Iterable[Entry]) -> Snapshot:
    """Sort the entries and add the directories that they imply.

    Raises SnapshotError if a path has a parent that is no directory.
    """
    found = {entry.path: entry for entry in entries}
    for path in list(found):
        parent = path.rpartition("/")[0]
        while parent:
            implied = Entry(parent, EntryKind.DIRECTORY, _IMPLIED_MODE, None)
            if found.setdefault(parent, implied).kind is not EntryKind.DIRECTORY:
                raise SnapshotError(f"path {path!r} passes through {parent!r}, which is not a directory")
            parent = parent.rpartition("/")[0]
    return Snapshot(tuple(sorted(found.values())))


def save(snapshot: Snapshot, blobs: BlobStore) -> str:
    rows = [[entry.path, entry.kind, entry.mode, entry.content] for entry in snapshot.entries]
    text = canonical_json({"format": FORMAT, "entries": rows})
    # escaped bytes of file names are lone surrogates, which strict UTF-8 refuses
    return blobs.put(text.encode("utf-8", "surrogatepass"))


def load(snapshot: str | Snapshot, blobs: BlobStore) -> Snapshot:
    """The snapshot with that id; a Snapshot is returned unchanged.

    Raises LogError if the blob is missing or corrupt, SnapshotError if it is no snapshot.
    """
    if isinstance(snapshot, Snapshot):
        return snapshot
    try:
        value = json.loads(blobs.get(snapshot).decode("utf-8", "surrogatepass"))
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, not {FORMAT!r}")
        rows = [Entry(path, EntryKind(kind), mode, content) for path, kind, mode, content in value["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"blob {snapshot} is not a snapshot: {error}") from error
    for entry in rows:
        if not entry.path or clean_path(entry.path) != entry.path:
            raise SnapshotError(f"snapshot {snapshot} holds the path {entry.path!r}, which is not plain")
    return make_snapshot(rows)


def copy(snapshot: str, source: BlobStore, target: BlobStore) -> None:
    """Put a snapshot and its files into another blob store. Raises as `load` does."""
    if snapshot in target or source.root == target.root:
        return
    for entry in load(snapshot, source).entries:
        if entry.kind is EntryKind.FILE:
            target.put(source.get(str(entry.content)))
    target.put(source.get(snapshot))  # last: a stored snapshot implies that its files are stored


def blobs_of(snapshot: str, blobs: BlobStore) -> Iterator[str]:
    """The ids of a snapshot's files. Raises as `load` does."""
    return (str(entry.content) for entry in load(snapshot, blobs).entries if entry.kind is EntryKind.FILE)


def changed_paths(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """Paths that differ, sorted. A created or removed directory is left out if a path in it is listed."""
    return worth_naming(before, after, differing_paths(before, after))


def differing_paths(before: Snapshot, after: Snapshot) -> tuple[str, ...]:
    """Every path whose entry differs, directories included, sorted."""
    old, new = before.by_path, after.by_path
    return tuple(sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path)))


def worth_naming(before: Snapshot, after: Snapshot, paths: Iterable[str]) -> tuple[str, ...]:
    paths = tuple(paths)
    parents = {path.rpartition("/")[0] for path in paths}

    def implied(path: str) -> bool:
        found = (before.by_path.get(path), after.by_path.get(path))
        came_or_went = None in found and any(entry and entry.kind is EntryKind.DIRECTORY for entry in found)
        return came_or_went and path in parents

    return tuple(path for path in paths if not implied(path))


def name_filter(exclude: Iterable[str]) -> re.Pattern[str]:
    """Matches the names that these patterns leave out of a snapshot."""
    patterns = [fnmatch.translate(pattern) for pattern in exclude]
    return re.compile("|".join(patterns) if patterns else r"(?!)")


EXCLUDED = name_filter(DEFAULT_EXCLUDES)


def is_excluded(path: str) -> bool:
    """Whether the path, or a folder above it, is in DEFAULT_EXCLUDES."""
    return any(EXCLUDED.match(part) for part in path.split("/"))
