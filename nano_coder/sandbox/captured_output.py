"""Captured output: reads pipes into bounded buffers that keep head and tail, and counts bytes."""

from __future__ import annotations

import array
import fcntl
import os
import select
import termios
import time
from collections.abc import Callable, Mapping
from typing import Any

from nano_coder.sandbox.protocol import ExecResult

FLOOD_BYTES = 64 << 20
"""bytes of both streams together, beyond which the program is killed"""

_CHUNK = 1 << 16
_SHORT_MS = 3
"""milliseconds; the output of a program that ends sooner is read in one pass at its end"""


class Output:
    """First and last half of a byte stream, and its true size."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.size = 0

    def feed(self, chunk: bytes) -> None:
        self.size += len(chunk)
        room = self._head_limit - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        # cut only beyond twice the limit: cutting at each chunk would move the tail each time
        if len(self._tail) > 2 * self._tail_limit:
            self._cut()

    def _cut(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_limit)]

    def value(self) -> bytes:
        self._cut()
        return bytes(self._head + self._tail)


def captured(out: Output, err: Output, started: float, **ending: Any) -> ExecResult:
    """The result of a program that wrote these streams; `started` is on the monotonic clock."""
    return ExecResult(
        stdout=out.value(), stderr=err.value(), stdout_bytes=out.size, stderr_bytes=err.size,
        wall_s=time.monotonic() - started, **ending,
    )  # fmt: skip


class Drain:
    """Reads pipes until `done` becomes readable; calls `kill` at the deadline or when there is too much
    output."""

    PATIENCE_S = 10.0
    """seconds that `done` may take after a kill"""

    def __init__(self, outputs: Mapping[int, Output], done: int, flood: int = FLOOD_BYTES) -> None:
        self._outputs = dict(outputs)
        self._done = done
        self._flood = flood
        self._early: tuple[int, Callable[[], bool]] | None = None
        self.timed_out = False
        self.flooded = False

    def stop_early_on(self, fd: int, announced: Callable[[], bool]) -> None:
        """Also stop when `fd` is readable and `announced()` is true."""
        self._early = fd, announced

    def run(self, timeout: float | None, kill: Callable[[], None]) -> bool:
        """True if `done` became readable; False if it did not, even after the kill."""
        poll = select.poll()
        poll.register(self._done, select.POLLIN)
        if self._early is not None:
            poll.register(self._early[0], select.POLLIN)
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._over(poll, poll.poll(_SHORT_MS if timeout is None else min(_SHORT_MS, timeout * 1000))):
            return True
        for fd in self._outputs:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        killed = False
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if killed:
                    return False
                self.timed_out = True
            if not killed and (self.timed_out or self.flooded):
                kill()
                killed, deadline, left = True, time.monotonic() + self.PATIENCE_S, self.PATIENCE_S
            events = poll.poll(None if left is None else left * 1000)
            if self._over(poll, events):
                return True
            for fd, _ in events:
                if fd in self._outputs and not self._read(fd):
                    poll.unregister(fd)

    def _over(self, poll: select.poll, events: list[tuple[int, int]]) -> bool:
        """Whether one of the events is the end; if so, takes all remaining output."""
        ready = {fd for fd, _ in events}
        if self._early is not None and self._early[0] in ready:
            if self._early[1]():
                self.take_written()
                return True
            poll.unregister(self._early[0])
            self._early = None
        if self._done in ready:
            self.finish()
            return True
        return False

    def finish(self) -> None:
        """Read what is left in the pipes; their writers are dead."""
        for fd in list(self._outputs):
            os.set_blocking(fd, False)
            while self._read(fd):
                pass

    def take_written(self) -> None:
        """Read what the pipes hold now, and no more: background processes of the program may write for
        ever."""
        waiting = array.array("i", [0])
        for fd, output in self._outputs.items():
            fcntl.ioctl(fd, termios.FIONREAD, waiting)
            until = output.size + waiting[0]
            while output.size < until and self._read(fd):
                pass

    def _read(self, fd: int) -> bool:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        self._outputs[fd].feed(chunk)
        self.flooded = sum(output.size for output in self._outputs.values()) > self._flood
        return bool(chunk)


class AnswerDrain(Drain):
    """Stops at what the pipes hold when the answer comes: processes that live on may write for ever."""

    def finish(self) -> None:
        self.take_written()
