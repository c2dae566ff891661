"""How a request ended, in a fixed number of bytes: init writes them, the agent reads and checks them.

No program and no runner ever holds the socket that they travel on. Between two words comes `READY`, with the
descriptors of the next runner, and the answer to who asked for the workspace.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

REFUSED, UNFIT = 1, 2
"""exit codes of trusted code inside: a file operation failed; a workspace cannot be unpacked"""
_FORM = struct.Struct("=hBdQH235s")
SIZE = _FORM.size
READY, PACKED, TOO_LONG = (_FORM.pack(number, 0, 0.0, 0, 0, b"") for number in (-1000, -1001, -1002))
"""no words, but as long as one: a runner waits for a request; the workspace is where it was asked for, or it
is too long to be sent at once"""
_LONGEST_TEXT = 235
_MOST_SIGNAL = 64


class Outcome(NamedTuple):
    """What a jail's init says of the end of a request."""

    exit_code: int | None
    """None when a signal ended it"""
    signal: int | None = None
    oom: bool = False
    cpu_s: float = 0.0
    peak_bytes: int = 0
    refused: tuple[int, str] | None = None
    """errno and text of what trusted code inside could not do"""


def encode(outcome: Outcome) -> bytes:
    """As `SIZE` bytes. A text that is too long is cut."""
    status = -(outcome.signal or 0) if outcome.exit_code is None else outcome.exit_code
    number, text = outcome.refused or (0, "")
    said = text.encode(errors="backslashreplace")[:_LONGEST_TEXT]
    return _FORM.pack(status, outcome.oom, outcome.cpu_s, outcome.peak_bytes, number, said)


def decode(data: bytes) -> Outcome:
    """Raises ValueError for what no init says."""
    if len(data) != SIZE:
        raise ValueError(f"a word of {len(data)} bytes, not {SIZE}")
    status, oom, cpu_s, peak_bytes, number, said = _FORM.unpack(data)
    if not -_MOST_SIGNAL <= status <= 255:
        raise ValueError(f"an exit status of {status}")
    if oom > 1:
        raise ValueError(f"a truth value of {oom}")
    if not (math.isfinite(cpu_s) and cpu_s >= 0):
        raise ValueError(f"{cpu_s} seconds of processor time")
    return Outcome(
        exit_code=status if status >= 0 else None,
        signal=-status if status < 0 else None,
        oom=bool(oom),
        cpu_s=cpu_s,
        peak_bytes=peak_bytes,
        refused=(number, said.rstrip(b"\0").decode(errors="backslashreplace")) if number else None,
    )
