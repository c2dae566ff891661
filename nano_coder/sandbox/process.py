"""The agent's side of a launcher and of its jails: starts, asks, collects, ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nano_coder.sandbox.launcher import group, message, word
from nano_coder.sandbox.launcher.word import Outcome
from nano_coder.sandbox.output import Drain, Output
from nano_coder.sandbox.remedy import cannot_isolate
from nano_shared.errors import SandboxError

_START = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.zygote import main; main()"
_PATIENCE_S = 30.0


class Launcher:
    """One launcher process, which makes jails: apart from the agent, with an empty environment."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """`spec` says what the root shows. Raises SandboxError, naming the layer and the remedy, where
        the root cannot be built."""
        self._lock = threading.Lock()
        self._closed = False
        self._group = spec.get("group")
        self.made = 0
        """jails so far"""
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
            self._control.settimeout(_PATIENCE_S)
            message.send(self._control, {"agent": os.getpid(), **spec})
            self._answer()
        except (SandboxError, OSError) as error:
            lost = error if isinstance(error, SandboxError) else self._lost()
            self.close()
            raise lost from error

    def make(self, room: dict[str, int]) -> JailProcess:
        """A new jail with a workspace of this size. Raises SandboxError where a layer fails."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox launcher is closed")
            try:
                message.send(self._control, room)
                connection, init = self._answer()
            except OSError as error:
                raise self._lost() from error
            self.made += 1
        jail = JailProcess(socket.socket(fileno=connection), init, self.last_words)
        try:
            jail.begin(_PATIENCE_S)
        except SandboxError:
            jail.close()
            raise
        return jail

    def _answer(self) -> list[int]:
        received = message.receive(self._control)
        if received is None:
            raise self._lost()
        return checked(received)[1]

    def _lost(self) -> SandboxError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return SandboxError(f"the sandbox launcher ended ({self.last_words()}); try again")

    def last_words(self) -> str:
        """The last line that the launcher or a jail's init wrote to its own stderr."""
        if self._closed:
            return "it is closed"
        said = os.pread(self._errors, 1 << 16, 0).decode(errors="backslashreplace").strip()
        return said.splitlines()[-1] if said else "it said nothing"

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def retire(self) -> None:
        """Make no more jails; the process ends with the last of them."""
        with self._lock, contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the launcher and with it every process and mount of its jails. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # before closing: a forked copy of this process would keep the connection alive
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._process.kill()
            self._process.wait()
            if self._group is not None:
                group.remove_of(self._process.pid, self._group["parents"].values())
            os.close(self._errors)


class JailProcess:
    """The connection to one jail. Requests are served one at a time; `close` may come from any thread."""

    def __init__(self, control: socket.socket, init: int, last_words: Any) -> None:
        """`init` is a pidfd of the jail's pid 1."""
        self._control = control
        self._init = init
        self._last_words = last_words
        self._lock = threading.Lock()
        self._closed = False
        self._streams: tuple[int, int] | None = None
        """where to read standard output and error of the next request"""
        self.listener: socket.socket | None = None
        """of a jail that was made to listen: its socket, to accept on"""

    def begin(self, patience: float) -> None:
        """Wait until every layer is up. Raises SandboxError where one is not."""
        self._control.settimeout(patience)
        try:
            _, fds = self._said()
            if fds:
                self.listener = socket.socket(fileno=fds[0])
            self._control.settimeout(None)
            self._hand_over_streams({"op": "streams"})
        except OSError as error:
            raise self._lost() from error

    def _hand_over_streams(self, request: dict[str, Any], given: Sequence[int] = ()) -> None:
        """Pipes for the next request: with it, or in a jail that waits ahead of it."""
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            (out, out_inside), (err, err_inside) = (_pipe(ours, theirs) for _ in range(2))
            message.send(self._control, request, [out_inside, err_inside, *given])
            self._streams = out, err
            ours.pop_all()

    def _close_streams(self) -> None:
        for fd in self._streams or ():
            os.close(fd)
        self._streams = None

    def call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        *,
        given: Sequence[int],
        timeout: float | None,
        flood: int,
    ) -> tuple[Outcome, Drain]:
        """Run one request and collect what it writes to stdout and stderr.

        `given` are descriptors of what it reads: a packed workspace where it says so, then standard input.
        """
        with self._lock:
            if self._closed:
                raise SandboxError("the jail is closed: open another")
            finished = False
            try:
                answer = self._call(request, outputs, given, timeout, flood)
                finished = True
            finally:
                if finished:
                    self._close_streams()
                else:
                    # interrupted half-way: what the jail says next would answer another question
                    self._end()
        return answer

    def _call(
        self,
        request: dict[str, Any],
        outputs: tuple[Output, Output],
        given: Sequence[int],
        timeout: float | None,
        flood: int,
    ) -> tuple[Outcome, Drain]:
        try:
            if self._streams is None:
                self._hand_over_streams(request, given)
            else:
                message.send(self._control, request, given)
        except OSError as error:
            raise self._lost() from error
        assert self._streams is not None
        out, err = self._streams
        drain = Drain({out: outputs[0], err: outputs[1]}, self._control.fileno(), flood)
        if not drain.run(timeout, self._stop):
            raise SandboxError(f"a jail did not end a program within {drain.PATIENCE_S:g} s")
        return self._heard(), drain

    def _heard(self) -> Outcome:
        """The word of init."""
        try:
            data = self._control.recv(word.SIZE, socket.MSG_WAITALL)
        except OSError as error:
            raise self._lost() from error
        if not data:
            raise self._lost()
        try:
            return word.decode(data)
        except ValueError as problem:
            raise SandboxError(f"a jail answered nonsense ({problem})") from problem

    @property
    def alive(self) -> bool:
        # the pidfd of a process that ended is readable
        return not self._closed and not select.select([self._init], [], [], 0)[0]

    def _said(self) -> tuple[dict[str, Any], list[int]]:
        received = message.receive(self._control)
        if received is None:
            raise self._lost()
        return checked(received)

    def _lost(self) -> SandboxError:
        return SandboxError(f"the jail ended ({self._last_words()}); open another, or is memory short?")

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            message.send(self._control, {"op": "kill"})

    def close(self) -> None:
        """Kill every process of the jail, and with the last its mounts. Idempotent."""
        with contextlib.suppress(OSError):
            # wakes a thread that waits in `call`
            self._control.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._end()

    def kill(self) -> None:
        """Kill init, and with it every process of the jail."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._init, signal.SIGKILL)

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.kill()
        os.close(self._init)
        self._control.close()
        self._close_streams()


def checked(received: tuple[dict[str, Any], list[int]]) -> tuple[dict[str, Any], list[int]]:
    """The answer, unless it names a layer that failed: then SandboxError."""
    reply, _ = received
    if "layer" in reply:
        raise cannot_isolate(reply["layer"], reply["errno"], reply["detail"])
    return received


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    theirs.callback(os.close, writing)
    return reading, writing
