"""The memory watch: memory of a jail's processes, in-memory file systems, sockets and file locks.

No rlimit bounds their sum. Not counted: mapped shared memory that no process has touched, and pipes, which
the kernel bounds for each user; a control group, where there is one, bounds both.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import cgroup

WATCH_S = 0.05
"""seconds before the first check of a program's memory, and between two while it changes"""
_LONGEST_S = 0.25
"""between two checks of a program whose memory stays as it is: many jails wait for a model or a server"""
_PAGE = resource.getpagesize()
_US = frozenset({"self", "1"})
_UNNAMED = (b"/dev/zero (deleted)", b"/memfd:", b"/SYSV")
"""mappings of memory that is in no file system of the jail"""

_INODE = 1024
"""bytes of kernel memory for a file or a link, besides its contents"""
_LOCK = 256
_TABLES = 1 << 33
"""addresses of a process from which on its page tables are counted: 2 MB of each may take one of 4 kB"""
_MOST_LOCKS = 4096
"""locks that end a program; reading their list takes longer the longer it is"""

_sockets: SocketMemory | None = None
_locks = -1
_programs = cgroup.JailCgroup()


def open_counters(programs: cgroup.JailCgroup) -> None:
    """From now on count sockets and locks too, if the kernel tells. To be called before the seccomp filter.

    `programs` is the control group of the watched programs.
    """
    global _sockets, _programs, _locks
    _programs = programs
    with contextlib.suppress(OSError):
        _sockets = SocketMemory()
        _locks = os.open("/proc/locks", os.O_RDONLY | os.O_CLOEXEC)


def programs() -> cgroup.JailCgroup:
    """The control group of the watched programs."""
    return _programs


class StartingMemory(NamedTuple):
    """Memory in use before a program begins, which does not count for it."""

    stored: int
    """bytes of its in-memory file systems, kernel memory of their files included"""
    kills: int
    """kills in the control group since it was created"""


def before(folders: Sequence[str]) -> StartingMemory:
    return StartingMemory(stored(folders), cgroup.kills(_programs.events))


class MemoryWatch:
    """Watches the memory of one program and its descendants, in bytes."""

    def __init__(self, most: int, folders: Sequence[str], began: StartingMemory | None = None) -> None:
        """`folders` are in-memory file systems; their contents when it `began` (None: now) do not count."""
        self._most = most
        self._folders = folders
        self._before = before(folders) if began is None else began
        self._used = 0
        self.pause_s = WATCH_S
        """seconds until the next check"""
        self.stopped = False
        """whether the agent stopped the program"""

    def exceeded(self) -> bool:
        # the kernel may kill a few processes, so that the rest stays below the limit
        if self._group_kills():
            return True
        locks = count_locks(_locks)
        if locks >= _MOST_LOCKS:
            return True
        beside = max(0, stored(self._folders) - self._before.stored) + locks * _LOCK
        if _sockets is not None:
            beside += _sockets.in_use()
        used = in_use() + beside
        self.pause_s = WATCH_S if used != self._used else min(2 * self.pause_s, _LONGEST_S)
        self._used = used
        # exact but slow, so only when the upper bound exceeds the limit
        return used > self._most and proportional() + beside > self._most

    def killed_by_group(self, status: int) -> bool:
        """Whether the kernel killed the program, of this wait status, or a descendant for memory."""
        return (
            not self.stopped
            and os.WIFSIGNALED(status)
            and os.WTERMSIG(status) == signal.SIGKILL
            and self._group_kills()
        )

    def _group_kills(self) -> bool:
        return cgroup.kills(_programs.events) > self._before.kills


def in_use() -> int:
    """Resident bytes of every process of this pid namespace but init; shared pages count once per process."""
    total = 0
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                size, resident = map(int, file.read().split(None, 2)[:2])
            total += resident * _PAGE
            if size * _PAGE > _TABLES:
                total += _page_tables(pid)
        except OSError:
            continue  # it ended meanwhile
    return total


def _page_tables(pid: str) -> int:
    """Bytes; the zero page behind them is not resident memory."""
    with open(f"/proc/{pid}/status", "rb") as file:
        fields = {line.split(b":")[0]: line for line in file}
    return _kilobytes(fields, b"VmPTE") * 1024


def proportional() -> int:
    """Bytes of anonymous memory, with each shared page counted once."""
    total = 0
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                fields = {line.split(b":")[0]: line for line in file}
            total += _kilobytes(fields, b"Pss_Anon") + _page_tables(pid) // 1024
            if _kilobytes(fields, b"Pss_Shmem"):
                total += _unnamed(pid)
        except OSError:
            continue
    return total * 1024


def _kilobytes(fields: dict[bytes, bytes], name: bytes) -> int:
    return int(fields[name].split()[1]) if name in fields else 0


def _unnamed(pid: str) -> int:
    """Kilobytes of shared memory without a file; files are counted with their file system."""
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
    """Bytes used in these file systems, kernel memory of their files included."""
    total = 0
    for folder in folders:
        status = os.statvfs(folder)
        total += (status.f_blocks - status.f_bfree) * status.f_frsize
        total += (status.f_files - status.f_ffree) * _INODE
    return total


def count_locks(table: int) -> int:
    """File locks of processes of this pid namespace; counting stops at `_MOST_LOCKS`.

    `table` is the open /proc/locks, or -1.
    """
    if table < 0:
        return 0
    os.lseek(table, 0, os.SEEK_SET)
    count, last = 0, b""
    while count < _MOST_LOCKS and (chunk := os.read(table, 1 << 16)):
        *lines, last = (last + chunk).split(b"\n")
        # locks of open file descriptions have no process; seccomp refuses them to programs
        count += sum(b" OFDLCK " not in line for line in lines)
    return count


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name not in _US]


_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST, _DUMP = 0x001, 0x300
_DONE, _ERROR = 3, 2
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_MEMORY = struct.Struct("=9I")
"""sk_meminfo: receive, its limit, send, its limit, forward, queued, options, backlog, drops"""
_ALL_STATES = 0xFFFF_FFFF
_UNIX_BODY, _UNIX_MEMORY = 16, 5
_INET_BODY, _INET_MEMORY = 72, 7
_CHUNK = 1 << 16
_SOCKET = 4096
"""bytes of kernel memory for a socket, besides its buffers"""


class SocketMemory:
    """Reads socket memory through a netlink socket that is opened before the filter. Needs no capability."""

    def __init__(self) -> None:
        """Raises OSError if the kernel has no sock_diag."""
        flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._netlink = socket.socket(socket.AF_NETLINK, flags, _NETLINK_SOCK_DIAG)
        self._counts = os.open("/proc/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
        self._counts6 = os.open("/proc/net/sockstat6", os.O_RDONLY | os.O_CLOEXEC)

    def in_use(self) -> int:
        """Bytes of all sockets of the network namespace, buffers included."""
        with contextlib.suppress(OSError):
            sockstat = os.pread(self._counts, 1024, 0)
            buffers = sum(self._dumped(*kind) for kind in self._kinds(sockstat))
            return buffers + _used(sockstat, b"sockets:", 1) * _SOCKET
        return 0

    def close(self) -> None:
        self._netlink.close()
        os.close(self._counts)
        os.close(self._counts6)

    def _kinds(self, sockstat: bytes) -> Iterator[tuple[bytes, int, int]]:
        """(request, length of an answer's body, attribute) for each family that has sockets."""
        # counting families is cheap; a dump visits every socket of the machine
        used = _used(sockstat, b"sockets:", 1)
        internet = [(family, protocol) for family, protocol, name, text in (
            (socket.AF_INET, socket.IPPROTO_TCP, b"TCP:", sockstat),
            (socket.AF_INET, socket.IPPROTO_UDP, b"UDP:", sockstat),
            (socket.AF_INET6, socket.IPPROTO_TCP, b"TCP6:", os.pread(self._counts6, 1024, 0)),
            (socket.AF_INET6, socket.IPPROTO_UDP, b"UDP6:", os.pread(self._counts6, 1024, 0)),
        ) if _used(text, name, 1)]  # fmt: skip
        for family, protocol in internet:
            body = struct.pack("=BBBxI48x", family, protocol, 1 << (_INET_MEMORY - 1), _ALL_STATES)
            yield body, _INET_BODY, _INET_MEMORY
        # one of them is ours
        if used > 1:
            show_memory = 0x20
            body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL_STATES, 0, show_memory, 0, 0)
            yield body, _UNIX_BODY, _UNIX_MEMORY

    def _dumped(self, request: bytes, body: int, attribute: int) -> int:
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0)
        self._netlink.send(header + request)
        total = 0
        while True:
            data, at = self._netlink.recv(_CHUNK), 0
            while at < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind in (_DONE, _ERROR):
                    return total
                total += _held(data[at + _HEADER.size + body : at + length], attribute)
                at += -(-length // 4) * 4


def _held(attributes: bytes, wanted: int) -> int:
    """Bytes of one socket, from the attributes of its answer."""
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if kind == wanted and length >= _ATTRIBUTE.size + _MEMORY.size:
            read, _, written, _, forward, queued, options, backlog, _ = _MEMORY.unpack_from(
                attributes, at + 4
            )
            # TCP counts unsent data as queued, UNIX sockets as send memory
            return int(read + max(written, queued) + forward + options + backlog)
        at += max(4, -(-length // 4) * 4)
    return 0


def _used(sockstat: bytes, name: bytes, least: int) -> int:
    """The number after `inuse` or `used` in a line of sockstat; 0 if it is below `least`."""
    for line in sockstat.splitlines():
        if line.startswith(name):
            count = int(line.split()[2])
            return count if count >= least else 0
    return 0
