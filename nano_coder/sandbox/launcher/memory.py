"""The memory a jail uses, summed over its processes, its file systems in memory, its sockets and its locks.

No rlimit counts that. Not counted: shared memory that no process has touched while it is mapped, and pipes,
which the kernel bounds for each user; where there is a control group, it bounds those.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Sequence
from typing import NamedTuple

from . import group
from .socket_memory import SocketMemory

_PAGE = resource.getpagesize()
_US = frozenset({"self", "1"})
_UNNAMED = (b"/dev/zero (deleted)", b"/memfd:", b"/SYSV")
"""what maps memory that is in no file system of the jail"""

_INODE = 1024
"""bytes of kernel memory for a file or a link, beside what it holds"""
_LOCK = 256
_MOST_LOCKS = 4096
"""whose list takes longer the longer it is: so many end a program"""

_sockets: SocketMemory | None = None
_locks = -1
_programs = group.Programs()


def open_counters(programs: group.Programs) -> None:
    """Count sockets and locks too, from now on, where the kernel tells. Before a filter refuses the question.

    `programs` is the control group of what is watched.
    """
    global _sockets, _programs, _locks
    _programs = programs
    with contextlib.suppress(OSError):
        _sockets = SocketMemory()
        _locks = os.open("/proc/locks", os.O_RDONLY | os.O_CLOEXEC)


def programs() -> group.Programs:
    """The control group of what is watched."""
    return _programs


class Before(NamedTuple):
    """What is there already when a program begins, and does not count."""

    stored: int
    """bytes in its file systems in memory, with those of the kernel for each file"""
    kills: int
    """in the control group, which counts them since it was made"""


def before(folders: Sequence[str]) -> Before:
    return Before(stored(folders), group.kills(_programs.events))


class Watch:
    """What one program and all that it starts may hold together, in bytes."""

    def __init__(self, most: int, folders: Sequence[str], began: Before | None = None) -> None:
        """`folders` are file systems in memory: what they held when it `began` (None: now) does not count."""
        self._most = most
        self._folders = folders
        self._before = before(folders) if began is None else began
        self.stopped = False
        """whether the agent asked for the end"""

    def exceeded(self) -> bool:
        locks = count_locks(_locks)
        if locks >= _MOST_LOCKS:
            return True
        beside = max(0, stored(self._folders) - self._before.stored) + locks * _LOCK
        if _sockets is not None:
            beside += _sockets.in_use()
        # slower, so asked only when the upper bound is too high
        return in_use() + beside > self._most and proportional() + beside > self._most

    def killed_by_group(self, status: int) -> bool:
        """Whether the kernel ended the program, of this wait status, or one that it started, for memory."""
        return (
            not self.stopped
            and os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGKILL
            and group.kills(_programs.events) > self._before.kills
        )


def in_use() -> int:
    """Bytes held by every process of this pid namespace but init; pages that two share count twice."""
    total = 0
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                total += int(file.read().split(None, 2)[1]) * _PAGE
        except OSError:
            continue  # it ended between the listing and the reading
    return total


def proportional() -> int:
    """Bytes of no file, with each shared page counted once."""
    total = 0
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                fields = {line.split(b":")[0]: line for line in file}
            total += _kilobytes(fields, b"Pss_Anon")
            if _kilobytes(fields, b"Pss_Shmem"):
                total += _unnamed(pid)
        except OSError:
            continue
    return total * 1024


def _kilobytes(fields: dict[bytes, bytes], name: bytes) -> int:
    return int(fields[name].split()[1]) if name in fields else 0


def _unnamed(pid: str) -> int:
    """Kilobytes of shared memory without a file: what has one is counted with its file system."""
    total, counting = 0, False
    with open(f"/proc/{pid}/smaps", "rb") as file:
        for line in file:
            if not line[:1].isupper():  # the first line of a mapping begins with its address
                name = line.split(None, 5)[5:]
                counting = bool(name) and name[0].startswith(_UNNAMED)
            elif counting and line.startswith(b"Pss:"):
                total += int(line.split()[1])
    return total


def stored(folders: Sequence[str]) -> int:
    """Bytes that file systems hold, and the kernel for each of their files."""
    total = 0
    for folder in folders:
        status = os.statvfs(folder)
        total += (status.f_blocks - status.f_bfree) * status.f_frsize
        total += (status.f_files - status.f_ffree) * _INODE
    return total


def count_locks(table: int) -> int:
    """Locks on files by processes of this pid namespace; more than `_MOST_LOCKS` are not counted to the end.

    `table` is /proc/locks, opened.
    """
    if table < 0:
        return 0
    os.lseek(table, 0, os.SEEK_SET)
    count, last = 0, b""
    while count < _MOST_LOCKS and (chunk := os.read(table, 1 << 16)):
        *lines, last = (last + chunk).split(b"\n")
        # the lock of an open file may be anybody's: such are refused to programs, and have no process
        count += sum(b" OFDLCK " not in line for line in lines)
    return count


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name not in _US]
