"""The agent's side of `launcher/kept.py`: the server that occupies a jail whose processes stay.

A request is a message, its answer an outcome record. The server shares the jail with untrusted programs, so
it can lie about itself; bytes that are no answer, or that nobody asked for, end it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from nano_coder.sandbox.captured_output import AnswerDrain, Drain, Output
from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.launcher.root import LAUNCHER_INSIDE
from nano_coder.sandbox.launcher_process import decoded, readable
from nano_shared.errors import SandboxError

_SOURCE = (
    f"import sys; sys.path.insert(0, {LAUNCHER_INSIDE!r}); from launcher.kept import serve; "
    f"sys.path.remove({LAUNCHER_INSIDE!r}); serve()"
)
_PATIENCE_S = 10.0


class JailServer:
    """A server in a jail, which is busy with it until its end. Requests are served one at a time."""

    def __init__(self, occupy: Callable[[str, int], RequestOutcome]) -> None:
        """`occupy` runs Python source in the jail on a socket, and returns when it has ended."""
        self.end: RequestOutcome | None = None
        """how it ended, with all processes of the jail"""
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._ended: Future[RequestOutcome] = Future()
        threading.Thread(target=self._live, args=(occupy, theirs), name="kept jail", daemon=True).start()

    def _live(self, occupy: Callable[[str, int], RequestOutcome], theirs: socket.socket) -> None:
        try:
            with theirs:
                outcome = occupy(_SOURCE, theirs.fileno())
        except SandboxError as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(outcome)

    def call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        *,
        given: Sequence[int],
        timeout: float | None,
        flood: int,
    ) -> tuple[RequestOutcome, Drain]:
        """As `JailProcess.call`. Where the server ends meanwhile, the outcome is that end."""
        (out, out_inside), (err, err_inside) = os.pipe(), os.pipe()
        try:
            with self._lock:
                started = time.monotonic()
                drain = AnswerDrain({out: outputs[0], err: outputs[1]}, self._channel.fileno(), flood)
                if readable(self._channel) and not self._hung_up():
                    raise SandboxError("the jail's server spoke without being asked")
                self._channel.settimeout(timeout)
                with contextlib.suppress(OSError):  # its missing answer shows that
                    message.send(self._channel, request, [out_inside, err_inside, *given])
                self._channel.settimeout(None)
                left = None if timeout is None else max(0.001, timeout - (time.monotonic() - started))
                reply = self._answer() if drain.run(left, self.stop) else self._lost()
        finally:
            for fd in (out, out_inside, err, err_inside):
                os.close(fd)
        if self.end is not None:  # what it exits with is not the exit code of the request
            reply = self.end._replace(exit_code=None, signal=self.end.signal or 9)
        return reply, drain

    def _hung_up(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return self._channel.recv(1, socket.MSG_PEEK) == b""
        return True

    def stop(self) -> None:
        """End the request that is served. Any thread may ask."""
        with contextlib.suppress(OSError):
            message.send(self._channel, {"op": "end"})

    def _answer(self) -> RequestOutcome:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            # recv and not recvmsg: the kernel then drops descriptors that come with the data
            data = self._channel.recv(message.OUTCOME_SIZE + 1)
        return decoded(data) if data else self._lost()

    def _lost(self) -> RequestOutcome:
        """The end of the server. Raises SandboxError if the jail is gone, or does not end it."""
        self._channel.close()
        try:
            self.end = self._ended.result(_PATIENCE_S)
        except NotYet:
            raise SandboxError("a jail did not end its processes; open another") from None
        return self.end

    def close(self) -> None:
        """Hang up, which ends the server and every process of the jail."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
