"""The agent's side of a launcher: starts it apart from everything, sends requests, and ends it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from nano_coder.sandbox.launcher import message
from nano_coder.sandbox.output import Drain, Output
from nano_coder.sandbox.remedy import cannot_isolate
from nano_shared.errors import SandboxError

_START = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.zygote import main; main()"
_PATIENCE_S = 30.0


class Launcher:
    """One launcher process. Requests are served one at a time; `close` may come from any thread."""

    def __init__(self, root: dict[str, Any], unused_uid: int) -> None:
        """Raises SandboxError, naming the layer and the remedy, where the root cannot be built."""
        self._lock = threading.Lock()
        self._closed = False
        self._control, theirs = socket.socketpair()
        self._errors = os.memfd_create("launcher-errors")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parent)],
                env={},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
        try:
            self._begin({"agent": os.getpid(), "root": root, "unused_uid": unused_uid})
        except SandboxError:
            self.close()
            raise

    def _begin(self, spec: dict[str, Any]) -> None:
        self._control.settimeout(_PATIENCE_S)
        try:
            message.send(self._control, spec)
            self._reply()
        except (BrokenPipeError, TimeoutError) as error:
            raise self._lost() from error
        self._control.settimeout(None)

    def _reply(self) -> dict[str, Any]:
        received = message.receive(self._control)
        if received is None:
            raise self._lost()
        reply, _ = received
        if "layer" in reply:
            raise cannot_isolate(reply["layer"], reply["errno"], reply["detail"])
        return reply

    def _lost(self) -> SandboxError:
        if self._closed:
            return SandboxError("the jail is closed: open another")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return SandboxError(f"the sandbox launcher ended ({self.last_words()}); open another jail")

    def last_words(self) -> str:
        """The last line that the launcher or a jail's init wrote to its own stderr."""
        said = os.pread(self._errors, 1 << 16, 0).decode(errors="backslashreplace").strip()
        return said.splitlines()[-1] if said else "it said nothing"

    def call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        *,
        stdin: int,
        timeout: float | None,
        flood: int,
    ) -> tuple[dict[str, Any], Drain]:
        """Run one request in a jail of its own and collect what it writes to stdout and stderr."""
        with self._lock:
            if self._closed:
                raise self._lost()
            finished = False
            try:
                answer = self._call(request, outputs, stdin, timeout, flood)
                finished = True
            finally:
                if not finished:
                    # interrupted half-way: what the launcher says next would answer another question
                    self._end()
        return answer

    def _call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        stdin: int,
        timeout: float | None,
        flood: int,
    ) -> tuple[dict[str, Any], Drain]:
        with contextlib.ExitStack() as stack:
            (out, out_inside), (err, err_inside) = _pipe(stack), _pipe(stack)
            try:
                message.send(self._control, request, [stdin, out_inside, err_inside])
            except OSError as error:
                raise self._lost() from error
            drain = Drain({out: outputs[0], err: outputs[1]}, self._control.fileno(), flood)
            if not drain.run(timeout, self._kill):
                raise SandboxError(f"the launcher did not end a jail within {drain.PATIENCE_S:g} s")
            return self._reply(), drain

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            message.send(self._control, {"op": "kill"})

    def close(self) -> None:
        """End the launcher and with it every process and mount of its jails. Idempotent."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        # before closing: a forked copy of this process would keep the connection alive
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_PATIENCE_S / 3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._errors)


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    stack.callback(os.close, writing)
    return reading, writing
