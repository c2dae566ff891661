"""Bytes as an open file: unnamed, in memory, and sealed so that nobody who is handed it changes it."""

from __future__ import annotations

import fcntl
import os


def seal(data: bytes) -> int:
    """A file descriptor at the beginning of `data`; the caller closes it."""
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd
