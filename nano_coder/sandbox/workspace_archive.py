"""Workspaces on their way into a jail: packed as a tar stream."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from nano_coder.sandbox.launcher import files
from nano_shared.errors import UsageError
from nano_shared.printable import printable
from nano_shared.scratch import is_scratch
from nano_shared.snapshot import SnapshotError

_LONGEST_NAME = 255
"""bytes of one path component, in every file system"""
_LONGEST_PATH = 2000
_NAMED = 5
"""unreadable paths that a sentence names"""


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
