"""As root: shows folders that only root can reach to a program of another user, in mounts of its own.

An interpreter below /root is the usual case.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import kernel

STAGE = "/tmp"


def staged(index: int) -> str:
    """Where the program finds the source of this index."""
    return f"{STAGE}/{index}"


def main(owner: int, sources: Sequence[str], argv: list[str]) -> NoReturn:
    """Become `argv` as `owner`, with `sources` staged. What fails is the last line of stderr."""
    try:
        _stage(sources)
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
        os.execve(argv[0], argv, {})
    except OSError as error:
        sys.exit(f"cannot show root's folders to uid {owner}: {error}")


def _stage(sources: Sequence[str]) -> None:
    kernel.unshare(kernel.NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # before the stage hides what lies below it
    held = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source in sources]
    kernel.mount("tmpfs", STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for index, fd in enumerate(held):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.mkdir(staged(index))
        else:
            os.close(os.open(staged(index), os.O_CREAT | os.O_WRONLY, 0o644))
        kernel.mount(f"/proc/self/fd/{fd}", staged(index), None, kernel.MS_BIND | kernel.MS_REC)
