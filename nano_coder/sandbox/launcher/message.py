"""Length-prefixed JSON with file descriptors, on the socket between the agent and a launcher."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_LONGEST = 64 << 20
_MOST_FDS = 8


def send(control: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    payload = json.dumps(message).encode()
    data = len(payload).to_bytes(4, "big") + payload
    # at once, so that the receiver wakes once
    sent = socket.send_fds(control, [data], list(fds))
    if sent < len(data):
        control.sendall(data[sent:])


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message with its descriptors, or None when the other side is gone or speaks nonsense."""
    try:
        header, fds, _, _ = socket.recv_fds(control, 4, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    message = _read(control, header)
    if message is not None:
        return message, fds
    for fd in fds:
        os.close(fd)
    return None


def _read(control: socket.socket, header: bytes) -> dict[str, Any] | None:
    header += _exactly(control, 4 - len(header))
    size = int.from_bytes(header, "big")
    if len(header) < 4 or size > _LONGEST:
        return None
    payload = _exactly(control, size)
    try:
        message = json.loads(payload) if len(payload) == size else None
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            chunk = control.recv(min(size - len(data), 1 << 20))
        except ConnectionResetError:
            break
        if not chunk:
            break
        data += chunk
    return bytes(data)
