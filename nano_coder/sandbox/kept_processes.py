"""Processes that a jail keeps between its runs: the agent's side of `launcher/kept.py`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from nano_coder.sandbox.captured_output import AnswerDrain, Drain, Output
from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.launcher.root import LAUNCHER_INSIDE
from nano_coder.sandbox.launcher_process import decoded
from nano_shared.errors import SandboxError

_SOURCE = (
    f"import sys; sys.path.insert(0, {LAUNCHER_INSIDE!r}); from launcher.kept import serve; "
    f"sys.path.remove({LAUNCHER_INSIDE!r}); serve()"
)
_PATIENCE_S = 10.0


def serving(occupy: Callable[[int], RequestOutcome], theirs: socket.socket) -> Future[RequestOutcome]:
    """Let a jail serve a socket, by `occupy` in a thread, which closes it; returns the end to come."""
    end: Future[RequestOutcome] = Future()

    def live() -> None:
        try:
            with theirs:
                outcome = occupy(theirs.fileno())
        except SandboxError as error:
            end.set_exception(error)
        else:
            end.set_result(outcome)

    threading.Thread(target=live, name="occupied jail", daemon=True).start()
    return end


class KeptProcesses:
    """A server in a jail, which is busy with it until its end. Requests are served one at a time."""

    def __init__(self, occupy: Callable[[str, int], RequestOutcome]) -> None:
        """`occupy` runs Python source in the jail on a socket, and returns when it has ended."""
        self.over = False
        """whether it ended, with all processes of the jail"""
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._end = serving(lambda channel: occupy(_SOURCE, channel), theirs)

    def call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        *,
        given: Sequence[int],
        timeout: float | None,
        flood: int,
    ) -> tuple[RequestOutcome, Drain]:
        """As `JailProcess.call`. Where the server ends meanwhile, the outcome is that end: `over` tells."""
        with self._lock:
            (out, out_inside), (err, err_inside) = os.pipe(), os.pipe()
            try:
                drain = AnswerDrain({out: outputs[0], err: outputs[1]}, self._channel.fileno(), flood)
                with contextlib.suppress(OSError):  # it ended: the missing answer shows that
                    message.send(self._channel, request, [out_inside, err_inside, *given])
                os.close(out_inside)
                os.close(err_inside)
                answered = drain.run(timeout, self._stop)
                return (self._answer() if answered else self._lost()), drain
            finally:
                os.close(out)
                os.close(err)

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            message.send(self._channel, {"op": "end"})

    def _answer(self) -> RequestOutcome:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._channel.recv(message.OUTCOME_SIZE, socket.MSG_WAITALL)
        return decoded(data) if data else self._lost()

    def _lost(self) -> RequestOutcome:
        """The end of the server. Raises SandboxError if the jail is gone, or does not end it."""
        self.over = True
        self._channel.close()
        try:
            end = self._end.result(_PATIENCE_S)
        except NotYet:
            raise SandboxError("a jail did not end its processes; open another") from None
        return RequestOutcome(None, end.signal or 9, end.oom, end.cpu_s, end.peak_bytes)

    def close(self) -> None:
        """Hang up, which ends the server and every process of the jail."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
