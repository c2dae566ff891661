"""Files written to a jail before its first request: they wait here, and go in with it, in one message."""

from __future__ import annotations

import os
from io import BytesIO

from nano_coder.sandbox.launcher import archive, files

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
