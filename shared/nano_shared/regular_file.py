"""Small files that a stranger may have put in place: a pipe, a device or a gigabyte is refused, not read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class NotReadable(ValueError):
    """Why a file that is there is not read."""


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file, or of one that a link leads to.

    Raises FileNotFoundError and other OSErrors, and NotReadable for what is no regular file or has more than
    `most` bytes.
    """
    # a pipe without a writer would wait for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise NotReadable(f"it is a {_kind(mode)}, not a file")
        content = file.read(most + 1)
    if len(content) > most:
        raise NotReadable(f"it has more than {most} bytes")
    return content


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
