"""A server that occupies a jail: the agent's side of `launcher/kept.py` and `launcher/session.py`.

A request is a message, its answer an outcome record. What serves may be untrusted code or share a process
with it, so it can lie about itself; bytes that are no answer, or that nobody asked for, end it.
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
    f"import sys; sys.path.insert(0, {LAUNCHER_INSIDE!r}); from launcher.{{module}} import serve; "
    f"sys.path.remove({LAUNCHER_INSIDE!r}); serve({{argument}})"
)
_PATIENCE_S = 10.0
_KILLED = RequestOutcome(None, 9)


class OutOfTurn(SandboxError):
    """The server wrote what is no answer, or what nobody asked for."""


class JailServer:
    """A server in a jail, which is busy with it until its end. Requests are served one at a time."""

    def __init__(
        self,
        occupy: Callable[[str, int], RequestOutcome],
        module: str,
        argument: str = "",
        *,
        streams: Sequence[int] = (),
    ) -> None:
        """`occupy` runs Python source in the jail on a socket, and returns when it has ended; `serve` of the
        launcher's `module` serves there. `streams` are descriptors that it gets first.

        Raises SandboxError if the jail is gone.
        """
        self.end: RequestOutcome | None = None
        """how it ended, with all processes of the jail"""
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        self._ended: Future[RequestOutcome] = Future()
        source = _SOURCE.format(module=module, argument=argument)
        threading.Thread(
            target=self._live, args=(occupy, source, theirs), name="occupied jail", daemon=True
        ).start()
        try:
            if streams:
                message.send(self._channel, {}, streams)
        except OSError as error:
            raise SandboxError(f"the jail's server could not begin ({error}); open another") from error

    def _live(self, occupy: Callable[[str, int], RequestOutcome], source: str, theirs: socket.socket) -> None:
        try:
            with theirs:
                outcome = occupy(source, theirs.fileno())
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
            pipes = {out: outputs[0], err: outputs[1]}
            reply, drain = self.ask(
                request, pipes, given=[out_inside, err_inside, *given], timeout=timeout, flood=flood
            )
        finally:
            for fd in (out, out_inside, err, err_inside):
                os.close(fd)
        if self.end is not None:  # what it exits with is not the exit code of the request
            reply = self.end._replace(exit_code=None, signal=self.end.signal or 9)
        return reply, drain

    def ask(
        self,
        request: dict[str, Any],
        pipes: dict[int, Output],
        *,
        given: Sequence[int],
        timeout: float | None,
        flood: int,
        kill: Callable[[], None] | None = None,
    ) -> tuple[RequestOutcome, Drain]:
        """The answer to a request, with what was written into `pipes` meanwhile.

        At the deadline `kill` ends everything; without it the server ends the request. Raises OutOfTurn, and
        SandboxError if the jail is gone.
        """
        with self._lock:
            started = time.monotonic()
            drain = AnswerDrain(pipes, self._channel.fileno(), flood)
            if readable(self._channel) and not self._hung_up():
                raise OutOfTurn("the jail's server spoke without being asked")
            self._channel.settimeout(timeout)
            with contextlib.suppress(OSError):  # it ended, or reads nothing: the missing answer shows that
                message.send(self._channel, request, given)
            self._channel.settimeout(None)
            left = None if timeout is None else max(0.001, timeout - (time.monotonic() - started))
            answered = drain.run(left, kill or self._stop)
            if kill is not None and (drain.timed_out or drain.flooded):
                return _KILLED, drain
            return (self._answer() if answered else self._lost()), drain

    def _hung_up(self) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return self._channel.recv(1, socket.MSG_PEEK) == b""
        return True

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            message.send(self._channel, {"op": "end"})

    def _answer(self) -> RequestOutcome:
        data = b""
        with contextlib.suppress(ConnectionResetError):
            # recv and not recvmsg: the kernel then drops descriptors that come with the data
            data = self._channel.recv(message.OUTCOME_SIZE + 1)
        if not data:
            return self._lost()
        try:
            return decoded(data)
        except SandboxError as problem:
            raise OutOfTurn(str(problem)) from problem

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
