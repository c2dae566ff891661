"""Reads a submitted folder once, without leaving it: what was hashed is what is graded.

Each folder is opened from its parent without following links, and each file is read through the descriptor
that was checked. Links out of the folder, files with further hard links elsewhere, pipes, devices and
unreadable files are reported and left out. Nothing is read twice.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nano_shared.errors import UsageError
from nano_shared.snapshot import (
    EXCLUDED,
    MAX_BYTES,
    MAX_ENTRIES,
    MODE_BITS,
    BlobStore,
    Entry,
    EntryKind,
    Snapshot,
    make_snapshot,
)
from nano_shared.types import Tampering

MAX_DEPTH = 64
MAX_FILE_BYTES = 64 * 2**20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# non-blocking: opening a pipe without a writer would block
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


@dataclass(frozen=True, slots=True)
class Left:
    """The contents of a folder at the moment of reading."""

    tree: Snapshot
    findings: tuple[Tampering, ...]
    states: dict[str, tuple[int, ...] | None]
    """path of a graded file -> its stat fields; None: it did not exist"""


@dataclass(slots=True)
class _Reading:
    blobs: BlobStore
    entries: dict[str, Entry] = field(default_factory=dict)
    findings: list[Tampering] = field(default_factory=list)
    room: int = MAX_BYTES

    def report(self, kind: str, path: str, what: str) -> None:
        self.findings.append(Tampering(kind=kind, detail=f"{path!r} {what}"))


def read_folder(directory: Path, blobs: BlobStore, graded: Iterable[str] = ()) -> Left:
    """Read every file once into `blobs`, the `graded` ones first, so that a flood of files cannot keep them
    out.

    Caches, environments and version control are left out. Raises UsageError for a path that is no folder.
    """
    graded = tuple(graded)
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise UsageError(f"no workspace at {str(directory)!r}: {problem.strerror}; name a folder") from None
    try:
        reading = _Reading(blobs)
        found = _listed(root, reading)
        for path in graded:
            if path not in found and (status := _status(root, path)) is not None:
                found[path] = status
        links = Counter((s.st_dev, s.st_ino) for s in found.values() if stat.S_ISREG(s.st_mode))
        for path in sorted(found, key=lambda name: (name not in graded, name)):
            _take(root, path, found[path], links, reading)
        states = {path: _signature(_status(root, path)) for path in graded}
    finally:
        os.close(root)
    return Left(make_snapshot(_without_orphans(reading.entries)), tuple(reading.findings), states)


def changed_since(directory: Path, left: Left) -> list[Tampering]:
    """The graded files that have changed since they were read."""
    try:
        root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return [Tampering(kind="changed", detail="the workspace went away while it was graded")]
    try:
        return [
            Tampering(
                kind="changed", detail=f"{path!r} was changed while it was graded; what was hashed counts"
            )
            for path, state in left.states.items()
            if _signature(_status(root, path)) != state
        ]
    finally:
        os.close(root)


def _listed(root: int, reading: _Reading) -> dict[str, os.stat_result]:
    found: dict[str, os.stat_result] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            with _opened(root, folder) as opened:
                names = sorted(name for name in os.listdir(opened) if not EXCLUDED.match(name))
                for name in names:
                    path = f"{folder}/{name}" if folder else name
                    if len(found) >= MAX_ENTRIES:
                        what = f"and what follows it is beyond {MAX_ENTRIES} entries"
                        reading.report("too_many", path, what)
                        return found
                    try:
                        status = os.stat(name, dir_fd=opened, follow_symlinks=False)
                    except OSError:
                        continue  # removed since it was listed
                    found[path] = status
                    if not stat.S_ISDIR(status.st_mode):
                        continue
                    if path.count("/") >= MAX_DEPTH:
                        reading.report("too_deep", path[:80], f"lies below {MAX_DEPTH} folders; left out")
                    else:
                        folders.append(path)
        except OSError as problem:
            reading.report("unreadable", folder, f"cannot be listed ({problem.strerror})")
    return found


@contextmanager
def _opened(root: int, folder: str) -> Iterator[int]:
    """A descriptor of a folder. Raises OSError if a part of the path is a link or missing."""
    opened = os.dup(root)
    try:
        for part in folder.split("/") if folder else ():
            below = os.open(part, _FOLDER, dir_fd=opened)
            os.close(opened)
            opened = below
        yield opened
    finally:
        os.close(opened)


def _status(root: int, path: str) -> os.stat_result | None:
    folder, _, name = path.rpartition("/")
    with suppress(OSError), _opened(root, folder) as opened:
        return os.stat(name, dir_fd=opened, follow_symlinks=False)
    return None


def _signature(status: os.stat_result | None) -> tuple[int, ...] | None:
    if status is None:
        return None
    return (
        status.st_dev,
        status.st_ino,
        status.st_mode,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _take(
    root: int, path: str, status: os.stat_result, links: Counter[tuple[int, int]], reading: _Reading
) -> None:
    mode = status.st_mode
    if stat.S_ISDIR(mode):
        reading.entries[path] = Entry(path, EntryKind.DIRECTORY, mode & MODE_BITS | 0o700, None)
    elif stat.S_ISLNK(mode):
        _take_link(root, path, reading)
    elif not stat.S_ISREG(mode):
        reading.report("special_file", path, "is a pipe, a socket or a device; it was not opened")
    elif status.st_nlink > links[status.st_dev, status.st_ino]:
        reading.report("hard_link", path, "has another name outside the workspace; it was not read")
    elif status.st_size > min(MAX_FILE_BYTES, reading.room):
        reading.report("too_large", path, f"holds {status.st_size} bytes; it was not read")
    else:
        _take_file(root, path, status, reading)


def _take_link(root: int, path: str, reading: _Reading) -> None:
    folder, _, name = path.rpartition("/")
    try:
        with _opened(root, folder) as opened:
            target = os.readlink(name, dir_fd=opened)
    except OSError:
        return
    reading.entries[path] = Entry(path, EntryKind.SYMLINK, 0, target)
    if target.startswith("/") or os.path.normpath(os.path.join(folder, target)).split("/")[0] == "..":
        reading.report("link", path, f"is a link to {target!r}, out of the workspace; it was not followed")


def _take_file(root: int, path: str, status: os.stat_result, reading: _Reading) -> None:
    folder, _, name = path.rpartition("/")
    try:
        with _opened(root, folder) as opened:
            file = open(os.open(name, _FILE, dir_fd=opened), "rb", buffering=0)  # noqa: SIM115
    except OSError as problem:
        reading.report("unreadable", path, f"cannot be read ({problem.strerror})")
        return
    with file:
        before = os.fstat(file.fileno())
        if _signature(before) != _signature(status):
            reading.report("changed", path, "was replaced while the workspace was read; it was left out")
            return
        data = bytearray()
        # one byte more than stat said, to detect growth
        while len(data) <= status.st_size and (piece := file.read(status.st_size + 1 - len(data))):
            data += piece
        if _signature(os.fstat(file.fileno())) != _signature(before) or len(data) != status.st_size:
            reading.report("changed", path, "was written to while it was read; it was left out")
            return
    reading.room -= len(data)
    reading.entries[path] = Entry(
        path, EntryKind.FILE, status.st_mode & MODE_BITS, reading.blobs.put(bytes(data))
    )


def _without_orphans(entries: dict[str, Entry]) -> list[Entry]:
    """The entries whose parents are folders; one may have been replaced during the reading."""

    def in_folders(path: str) -> bool:
        above = (entries.get(str(parent)) for parent in PurePosixPath(path).parents)
        return all(entry is None or entry.kind is EntryKind.DIRECTORY for entry in above)

    return [entry for path, entry in entries.items() if in_folders(path)]
