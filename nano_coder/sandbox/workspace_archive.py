"""Workspaces on their way into a jail: packed as a tar stream, or unpacked once below the overlays of jails.

A base of overlays is a folder of NANO_HOME/bases, named by the hash of its tar stream. It is built under a
lock in a temporary folder and renamed, so builders may race or be killed, and a folder with that name is
always complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, cast

from nano_coder.sandbox.launcher import archive, files, kernel
from nano_shared.errors import UsageError
from nano_shared.files import is_scratch, nano_home
from nano_shared.printable import printable
from nano_shared.snapshot import SnapshotError

_LONGEST_NAME = 255
"""bytes of one path component, in every file system"""
_LONGEST_PATH = 2000
_NAMED = 5
"""unreadable paths that a sentence names"""


class PendingFiles:
    """Files to be sent with the first request of an empty workspace. What could fail is left to the jail."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._folders: set[str] = set()
        self._room = files.SMALL_BYTES // 2
        """bytes, such that the archive stays below SMALL_BYTES"""

    def __bool__(self) -> bool:
        return bool(self._files)

    def keep(self, path: str, data: bytes) -> bool:
        """Queue a file; False if it must be written in the jail. Raises the errors of `files.write`."""
        name = files.check_path(path)
        parts = name.split("/")
        parents = {"/".join(parts[:end]) for end in range(1, len(parts))}
        size = len(data) + archive.ROOM * (1 + len(parts))
        if name == "." or path.endswith("/") or name in self._folders or not parents.isdisjoint(self._files):
            return False
        if size > self._room or len(name) > _LONGEST_PATH or not all(map(_usual, parts)):
            return False
        self._room -= size
        self._folders |= parents
        self._files[name] = data
        return True

    def packed(self) -> bytes:
        """The queued files as a tar stream."""
        out = BytesIO()
        for name, data in self._files.items():
            archive.write_member(out, archive.TarMember(name, archive.FILE, 0o644, len(data)))
            out.write(data)
            archive.write_padding(out, len(data))
        archive.write_end(out)
        return out.getvalue()


def _usual(part: str) -> bool:
    try:
        return len(os.fsencode(part)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


EXCLUDED = frozenset(
    {".git", ".hg", ".svn", ".venv", "__pycache__", "node_modules", ".tox", ".pytest_cache", ".mypy_cache",
     ".ruff_cache"}
)  # fmt: skip
"""names that are not copied into a jail: regenerable files, and repositories, which may hold secrets"""
WORK_MB = 512
"""MB that may be added to a workspace, besides twice its initial size"""
MOST_ENTRIES = 20_000
"""files, folders and links that may be added to a workspace"""


@dataclass(frozen=True, slots=True)
class PackedWorkspace:
    """A workspace as a tar stream, in memory or in a temporary file; the caller closes it."""

    stream: IO[bytes]
    size: int
    """of the stream, bytes"""
    entries: int
    """number of files, directories and symlinks"""

    @property
    def small(self) -> bool:
        """Whether it fits every jail, so that it can be sent with a request."""
        return self.size <= files.SMALL_BYTES


def snapshot_error(error: OSError, top: str = "/work") -> SnapshotError:
    """The error for a workspace below `top` of which no snapshot can be taken."""
    name = str(error.filename or "").removeprefix(top).strip("/")
    place = f" ({name[:100]!r})" if name else ""
    return SnapshotError(
        f"the workspace cannot be kept: {error.strerror or error}{place}; remove or mend that, or nothing of "
        "this run counts"
    )


def pack_workspace(folder: Path) -> PackedWorkspace:
    """Pack a folder. What its owner's permissions keep from being read is read in folders of ours, and left
    out of others, with a sentence. Raises UsageError if the folder is missing or cannot be read."""
    if not folder.exists():
        raise UsageError(f"no workspace at {str(folder)!r}: name an existing directory")
    if not folder.is_dir():
        raise UsageError(f"the workspace {str(folder)!r} is not a directory: name its directory")
    stream = tempfile.SpooledTemporaryFile(files.SMALL_BYTES, prefix="nano-workspace-")  # noqa: SIM115 (handed over)
    try:
        ours = is_scratch(folder)
        entries, unread = files.pack(os.fspath(folder), cast(IO[bytes], stream), EXCLUDED, ours=ours)
        say_unread(folder, unread)
    except OSError as error:
        stream.close()
        raise UsageError(
            f"cannot read {error.filename!r} of the workspace {str(folder)!r}: {error.strerror}"
        ) from error
    size = stream.tell()
    stream.seek(0)
    return PackedWorkspace(cast(IO[bytes], stream), size, entries)


def say_unread(folder: Path, paths: Sequence[str]) -> None:
    """Name on stderr the paths of a user's folder that are unreadable, and so not in the workspace."""
    if paths:
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        named = ", ".join(map(repr, paths[:_NAMED]))
        print(
            printable(f"{folder}: you may not read {named}{more}: left out, and left as it is"),
            file=sys.stderr,
        )


OVERLAID_ENTRIES = 400
"""number of entries from which an overlay is faster than streaming the workspace"""
KEPT_BASES = 20
"""number of bases that survive when a new one is built, most recently used first"""
_TREE = "tree"
_CHUNK = 1 << 20
_in_use: dict[str, int] = {}


def bases_folder() -> Path:
    return nano_home() / "bases"


def overlays_supported() -> bool:
    """Whether the kernel has overlayfs; whether a jail may mount one shows when it tries."""
    try:
        return "\toverlay\n" in Path("/proc/filesystems").read_text()
    except OSError:
        return False


def base_of(stream: IO[bytes], owner: int | None) -> str:
    """The name of the base with the contents of the stream, built if it does not exist yet.

    `owner` is the uid and gid that own the files, if not ours. Until this process ends the base is not
    pruned. Raises OSError if it cannot be built.
    """
    stream.seek(0)
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    name = digest.hexdigest() + (f"-{owner}" if owner is not None else "")
    if name not in _in_use:
        bases_folder().mkdir(parents=True, exist_ok=True, mode=0o755)
        _in_use[name] = _hold(name, stream, owner)
    with contextlib.suppress(OSError):
        os.utime(bases_folder() / f"{name}.lock")
    return name


def _hold(name: str, stream: IO[bytes], owner: int | None) -> int:
    """Take a shared lock on a base, building it if needed. Returns the lock's descriptor."""
    lock = os.open(bases_folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not (bases_folder() / name).is_dir():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (bases_folder() / name).is_dir():
                _prune()
                _build(bases_folder() / name, stream, owner)
            fcntl.flock(lock, fcntl.LOCK_SH)
    except OSError:
        os.close(lock)
        raise
    return lock


def _build(place: Path, stream: IO[bytes], owner: int | None) -> None:
    building = place.with_name(f"{place.name}.building")
    _remove(building)  # left by a builder that was killed
    tree = building / _TREE
    tree.mkdir(parents=True, mode=0o755)
    if owner is not None:
        os.chown(tree, owner, owner)
    stream.seek(0)
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY)
    try:
        with contextlib.nullcontext() if owner is None else kernel.as_file_user(owner, owner):
            files.unpack(root, stream)
        os.chmod(tree, 0o755)
        os.rename(building, place)
    except OSError:
        _remove(building)
        raise
    finally:
        os.close(root)


def _prune() -> None:
    """Remove leftovers of killed builders, and the least recently used bases that no process uses."""
    locks = sorted(bases_folder().glob("*.lock"), key=lambda path: path.stat().st_mtime, reverse=True)
    for number, path in enumerate(locks):
        building = path.with_name(f"{path.stem}.building")
        if number < KEPT_BASES and not building.exists():
            continue
        with _unused(path) as free:
            if free:
                _remove(building)
                if number >= KEPT_BASES:
                    _remove(path.with_suffix(""))


@contextlib.contextmanager
def _unused(path: Path) -> Iterator[bool]:
    """Whether no process builds or uses the base; it stays locked inside the block."""
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    """Remove a tree whatever its permissions and depth; does nothing if it does not exist."""
    with contextlib.suppress(OSError):
        files.clear(os.fspath(path))
        path.rmdir()
