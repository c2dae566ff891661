"""The agent's side of a runner: where its request goes in, and its output and its end come out."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

from nano_coder.sandbox.launcher import message, resource_usage
from nano_coder.sandbox.launcher.outcome_record import Outcome


class Runner:
    """One request of a jail, that it waits for."""

    def __init__(self, fds: Sequence[int], number: int) -> None:
        """`fds`, which it owns: its output, its errors, its announcement, its socket, its pidfd.

        `number` counts the runners of the jail.
        """
        self.out, self.err, self.done, requests, handle = fds
        self.number = number
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, requests)
        self._code: int | None = None
        self._before = 0.0
        self._books: resource_usage.Books | None = None
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)
        # not where /proc is that of others, or hides processes: then init tells what was used
        with contextlib.suppress(OSError):
            self._books = resource_usage.Books(resource_usage.pid_of(handle))
        os.close(handle)

    def ask(self, request: dict[str, Any], given: Sequence[int]) -> None:
        """Raises OSError where it is gone."""
        if self._books is not None:
            self._before = self._books.cpu_seconds() or 0.0
        message.send(self._requests, request, given)

    def says_done(self) -> bool:
        """Whether what is on `done` is an announcement: one byte, the exit code.

        The program may have written it, and says no more by it than `os._exit` does.
        """
        said = os.read(self.done, 2)
        self._code = said[0] if len(said) == 1 else None
        return self._code is not None

    @property
    def exit_code(self) -> int | None:
        """What it announced."""
        return self._code

    def outcome(self) -> Outcome | None:
        """How it ended, with what the kernel counted; None where only init can tell."""
        used = self._books.used() if self._books is not None and self._code is not None else None
        if used is None:
            return None
        return Outcome(exit_code=self._code, cpu_s=max(0.0, used[0] - self._before), peak_bytes=used[1])

    def dismiss(self) -> None:
        """Let init end it when it wakes next; to wake it now would be to wait for it."""
        with contextlib.suppress(OSError):
            self._requests.send(b"\0")

    def close(self) -> None:
        for fd in (self.out, self.err, self.done):
            os.close(fd)
        self._requests.close()
        if self._books is not None:
            self._books.close()
