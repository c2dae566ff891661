"""What the sockets of a network namespace hold in their buffers, as the kernel's sock_diag tells it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST, _DUMP = 0x001, 0x300
_DONE, _ERROR = 3, 2
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_MEMORY = struct.Struct("=9I")
"""sk_meminfo: read, its limit, written, its limit, forward, queued, options, backlog, drops"""
_ALL_STATES = 0xFFFF_FFFF
_UNIX_BODY, _UNIX_MEMORY = 16, 5
_INET_BODY, _INET_MEMORY = 72, 7
_CHUNK = 1 << 16
_SOCKET = 4096
"""bytes of kernel memory for a socket, beside its buffers"""


class SocketMemory:
    """Asks on a socket that is opened before a filter refuses its family. Needs no capability."""

    def __init__(self) -> None:
        """Raises OSError where the kernel has no sock_diag."""
        flags = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._netlink = socket.socket(socket.AF_NETLINK, flags, _NETLINK_SOCK_DIAG)
        self._counts = os.open("/proc/net/sockstat", os.O_RDONLY | os.O_CLOEXEC)
        self._counts6 = os.open("/proc/net/sockstat6", os.O_RDONLY | os.O_CLOEXEC)

    def in_use(self) -> int:
        """Bytes in the buffers of every socket of the namespace that was opened from, and of the sockets."""
        with contextlib.suppress(OSError):
            told = os.pread(self._counts, 1024, 0)
            buffers = sum(self._dumped(*kind) for kind in self._kinds(told))
            return buffers + _used(told, b"sockets:", 1) * _SOCKET
        return 0

    def close(self) -> None:
        self._netlink.close()
        os.close(self._counts)
        os.close(self._counts6)

    def _kinds(self, told: bytes) -> Iterator[tuple[bytes, int, int]]:
        """(request, length of an answer's body, attribute), for the families that have sockets."""
        # families are counted cheaply; asking goes through every socket of the machine
        used = _used(told, b"sockets:", 1)
        internet = [(family, protocol) for family, protocol, name, text in (
            (socket.AF_INET, socket.IPPROTO_TCP, b"TCP:", told),
            (socket.AF_INET, socket.IPPROTO_UDP, b"UDP:", told),
            (socket.AF_INET6, socket.IPPROTO_TCP, b"TCP6:", os.pread(self._counts6, 1024, 0)),
            (socket.AF_INET6, socket.IPPROTO_UDP, b"UDP6:", os.pread(self._counts6, 1024, 0)),
        ) if _used(text, name, 1)]  # fmt: skip
        for family, protocol in internet:
            body = struct.pack("=BBBxI48x", family, protocol, 1 << (_INET_MEMORY - 1), _ALL_STATES)
            yield body, _INET_BODY, _INET_MEMORY
        # ours is one of them
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
    """Bytes that one socket holds, from the attributes of its answer."""
    at = 0
    while at + _ATTRIBUTE.size <= len(attributes):
        length, kind = _ATTRIBUTE.unpack_from(attributes, at)
        if kind == wanted and length >= _ATTRIBUTE.size + _MEMORY.size:
            read, _, written, _, forward, queued, options, backlog, _ = _MEMORY.unpack_from(
                attributes, at + 4
            )
            # TCP counts what waits to be sent as queued, UNIX sockets as written
            return int(read + max(written, queued) + forward + options + backlog)
        at += max(4, -(-length // 4) * 4)
    return 0


def _used(told: bytes, name: bytes, least: int) -> int:
    """The number after `inuse` or `used` in a line of sockstat, 0 below `least`."""
    for line in told.splitlines():
        if line.startswith(name):
            count = int(line.split()[2])
            return count if count >= least else 0
    return 0
