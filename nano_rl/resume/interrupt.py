"""Signals to a training: the first finishes the step and saves, the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from nano_shared.errors import NanoError

GRACE_SECONDS = 2.0
"""seconds after the second signal to close jails and connections; then the process exits"""
INTERRUPTED = 130


class TrainingStopped(NanoError):
    """Training stopped by a signal, after its current step was finished and saved."""

    exit_code = INTERRUPTED


class Interrupt:
    """The handler of SIGINT and SIGTERM; `requested` is True after the first signal."""

    def __init__(self) -> None:
        self.requested = False
        self._end: threading.Timer | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested = True
            # not print: the signal may interrupt another print
            os.write(2, b"\nfinishing this step, then saving; once more to stop at once\n")
            return
        # running rollouts may take minutes; states and log are written atomically, so that this is safe
        self._end = threading.Timer(GRACE_SECONDS, _end)
        self._end.daemon = True
        self._end.start()
        raise KeyboardInterrupt

    def forget(self) -> None:
        if self._end is not None:
            self._end.cancel()


def _end() -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h")  # a progress bar hides the cursor
    os._exit(INTERRUPTED)


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Handle SIGINT and SIGTERM until the block ends; outside the main thread do nothing."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        interrupt.forget()
