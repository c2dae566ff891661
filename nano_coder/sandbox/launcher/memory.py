"""The memory a jail uses, summed over its processes, its file systems in memory and its sockets.

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
_LEAST_SHARE = 8
_UNNAMED = (b"/dev/zero (deleted)", b"/memfd:", b"/SYSV")
"""what maps memory that is in no file system of the jail"""

_sockets: SocketMemory | None = None
_events = -1


def open_counters(events: int) -> None:
    """Count sockets too, from now on, where the kernel tells. Before a filter refuses the question.

    `events` is the open file in which the control group counts its kills, or below zero.
    """
    global _sockets, _events
    _events = events
    with contextlib.suppress(OSError):
        _sockets = SocketMemory()


def events() -> int:
    """The open file in which the control group counts its kills, or below zero."""
    return _events


class Before(NamedTuple):
    """What is there already when a program begins, and does not count."""

    stored: int
    """bytes in its file systems in memory"""
    kills: int
    """by the control group, which counts them since it was made"""


def before(folders: Sequence[str]) -> Before:
    return Before(stored(folders), group.kills(_events))


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
        beside = max(0, stored(self._folders) - self._before.stored)
        if _sockets is not None:
            beside += _sockets.in_use()
        # slower, so asked only when the upper bound is too high
        return in_use() + beside > self._most and proportional() + beside > self._most

    def killed_by_group(self, status: int, peak: int) -> bool:
        """Whether the kernel ended the program, of this wait status, for what all jails hold together.

        It picks a process that holds much, so one that held little ended itself at the same moment.
        """
        return (
            not self.stopped
            and os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGKILL
            and peak >= self._most // _LEAST_SHARE
            and group.kills(_events) > self._before.kills
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
    """Bytes that file systems hold."""
    statuses = (os.statvfs(folder) for folder in folders)
    return sum((status.f_blocks - status.f_bfree) * status.f_frsize for status in statuses)


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name not in _US]
