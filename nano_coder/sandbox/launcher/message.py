"""Messages between the agent, a launcher and its jails: JSON with file descriptors, and outcome records.

An outcome record has a fixed size: init writes it when a request ends, the agent reads and checks it. Neither
programs nor runners hold the socket of these records. Between two of them init sends READY with the
descriptors of the next runner, and answers to requests for the workspace.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

_LONGEST = 64 << 20
_MOST_FDS = 8


def send(control: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    payload = json.dumps(message).encode()
    data = len(payload).to_bytes(4, "big") + payload
    # in one call, so that the receiver wakes once
    sent = socket.send_fds(control, [data], list(fds))
    if sent < len(data):
        control.sendall(data[sent:])


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message with its descriptors; None if the other side is gone or sends nonsense."""
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


REFUSED, UNFIT = 1, 2
"""exit codes of trusted code inside: a file operation failed; a workspace cannot be unpacked"""
_FORM = struct.Struct("=hBdQH235s")
OUTCOME_SIZE = _FORM.size
READY, PACKED, TOO_LONG = (_FORM.pack(number, 0, 0.0, 0, 0, b"") for number in (-1000, -1001, -1002))
"""records that are no outcomes but have their size: a runner waits for a request; the workspace was written;
the workspace is too long to be sent in one piece"""
_LONGEST_TEXT = 235
_MOST_SIGNAL = 64


class RequestOutcome(NamedTuple):
    """Init's report of the end of a request."""

    exit_code: int | None
    """None if a signal ended it"""
    signal: int | None = None
    oom: bool = False
    cpu_s: float = 0.0
    peak_bytes: int = 0
    refused: tuple[int, str] | None = None
    """errno and text of an operation of trusted code inside that failed"""
    ended: bool = False
    """whether the request ended the session that it belongs to"""


def encode_outcome(outcome: RequestOutcome) -> bytes:
    """The outcome as `OUTCOME_SIZE` bytes. A text that is too long is cut."""
    status = -(outcome.signal or 0) if outcome.exit_code is None else outcome.exit_code
    number, text = outcome.refused or (0, "")
    said = text.encode(errors="backslashreplace")[:_LONGEST_TEXT]
    return _FORM.pack(
        status, outcome.oom | outcome.ended << 1, outcome.cpu_s, outcome.peak_bytes, number, said
    )


def decode_outcome(data: bytes) -> RequestOutcome:
    """Raises ValueError for bytes that no init sends."""
    if len(data) != OUTCOME_SIZE:
        raise ValueError(f"a record of {len(data)} bytes, not {OUTCOME_SIZE}")
    status, flags, cpu_s, peak_bytes, number, said = _FORM.unpack(data)
    if not -_MOST_SIGNAL <= status <= 255:
        raise ValueError(f"an exit status of {status}")
    if flags > 3:
        raise ValueError(f"flags of {flags}")
    if not (math.isfinite(cpu_s) and cpu_s >= 0):
        raise ValueError(f"{cpu_s} seconds of processor time")
    return RequestOutcome(
        exit_code=status if status >= 0 else None,
        signal=-status if status < 0 else None,
        oom=bool(flags & 1),
        ended=bool(flags & 2),
        cpu_s=cpu_s,
        peak_bytes=peak_bytes,
        refused=(number, said.rstrip(b"\0").decode(errors="backslashreplace")) if number else None,
    )
