"""Packs a workspace for a jail: checked, and as a tar stream without caches and repositories."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, cast

from nano_coder.sandbox.launcher import archive, files
from nano_shared.errors import UsageError
from nano_shared.snapshot import SnapshotError

_LONGEST_NAME = 255
"""bytes of one path component, in every file system"""
_LONGEST_PATH = 2000


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
    """Pack a folder. Raises UsageError if it, or a file in it, is missing or cannot be read."""
    if not folder.exists():
        raise UsageError(f"no workspace at {str(folder)!r}: name an existing directory")
    if not folder.is_dir():
        raise UsageError(f"the workspace {str(folder)!r} is not a directory: name its directory")
    stream = tempfile.SpooledTemporaryFile(files.SMALL_BYTES, prefix="nano-workspace-")  # noqa: SIM115 (handed over)
    try:
        entries = files.pack(os.fspath(folder), cast(IO[bytes], stream), EXCLUDED)
    except OSError as error:
        stream.close()
        raise UsageError(
            f"cannot read {error.filename!r} of the workspace {str(folder)!r}: {error.strerror}"
        ) from error
    size = stream.tell()
    stream.seek(0)
    return PackedWorkspace(cast(IO[bytes], stream), size, entries)
