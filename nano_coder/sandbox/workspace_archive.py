"""The workspace on its way in: checked, and packed as a stream without caches and repositories."""

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
"""bytes of one part of a path, in any file system"""
_LONGEST_PATH = 2000


class Ahead:
    """What an empty workspace will begin with. Every write that might fail inside is left to the inside."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._folders: set[str] = set()
        self._room = files.SMALL_BYTES // 2
        """bytes, so that the archive is certainly a small one"""

    def __bool__(self) -> bool:
        return bool(self._files)

    def keep(self, path: str, data: bytes) -> bool:
        """Whether it waits now. Raises PermissionError and FileNotFoundError as `files.write` would."""
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
        """The files as a tar stream."""
        out = BytesIO()
        for name, data in self._files.items():
            archive.write_member(out, archive.Member(name, archive.FILE, 0o644, len(data)))
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
"""names that are not copied into a jail: what tools can make again, and histories that hold secrets"""
WORK_MB = 512
"""room of a workspace, beside twice what it started with"""
MOST_ENTRIES = 20_000
"""files, folders and links that may be added to one"""


@dataclass(frozen=True, slots=True)
class Packed:
    """A workspace as a tar stream, in memory or in an unnamed temporary file; the caller closes it."""

    stream: IO[bytes]
    size: int
    """bytes of the stream"""
    entries: int
    """files, directories and symlinks"""

    @property
    def small(self) -> bool:
        """Certain to fit any jail, so that it may travel with a request."""
        return self.size <= files.SMALL_BYTES


def unkept(error: OSError, top: str = "/work") -> SnapshotError:
    """What is told of the workspace `top`, of which no snapshot can be taken."""
    name = str(error.filename or "").removeprefix(top).strip("/")
    place = f" ({name[:100]!r})" if name else ""
    return SnapshotError(
        f"the workspace cannot be kept: {error.strerror or error}{place}; remove or mend that, or nothing of "
        "this run counts"
    )


def pack_workspace(folder: Path) -> Packed:
    """Raises UsageError where the folder, or a file in it, is missing or cannot be read."""
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
    return Packed(cast(IO[bytes], stream), size, entries)
