"""The agent's side of a launcher and of its jails: starts, asks, collects, ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nano_coder.sandbox.captured_output import Drain, Output
from nano_coder.sandbox.launcher import group, message, outcome_record
from nano_coder.sandbox.launcher.outcome_record import Outcome
from nano_coder.sandbox.request_process import Runner
from nano_coder.sandbox.unavailable import cannot_isolate
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
        # of our own: other processes, of other pid namespaces too, may have theirs beside it
        name = f"{group.PREFIX}{secrets.token_hex(8)}"
        self._group = spec["group"] and {**spec["group"], "name": name}
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
            message.send(self._control, {**spec, "agent": os.getpid(), "group": self._group})
            self.grouped = self._answer()[0]["grouped"]
            """whether its jails have control groups"""
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
                connection, init = self._answer()[1]
            except OSError as error:
                raise self._lost() from error
            self.made += 1
        jail = JailProcess(socket.socket(fileno=connection), init, self.last_words)
        jail.grouped = self.grouped
        try:
            jail.begin(_PATIENCE_S)
        except SandboxError:
            jail.close()
            raise
        return jail

    def _answer(self) -> tuple[dict[str, Any], list[int]]:
        received = message.receive(self._control)
        if received is None:
            raise self._lost()
        return checked(received)

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
                with contextlib.suppress(OSError):
                    group.Group(self._group).remove()
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
        self._runner: Runner | None = None
        """that waits for a request, or has served one that init has not told the end of"""
        self._owed = False
        """whether init still has to tell the end of a request that was over early"""
        self._served = 0
        self.listener: socket.socket | None = None
        """of a jail that was made to listen: its socket, to accept on"""
        self.on_close: Callable[[], None] | None = None
        self.grouped = False
        """whether it has a control group of its own"""

    def begin(self, patience: float) -> None:
        """Wait until every layer is up. Raises SandboxError where one is not."""
        self._control.settimeout(patience)
        try:
            received = message.receive(self._control)
            self._control.settimeout(None)
        except OSError as error:
            raise self._lost() from error
        if received is None:
            raise self._lost()
        fds = checked(received)[1]
        self._runner = Runner(fds[:5], 0)
        if fds[5:]:
            self.listener = socket.socket(fileno=fds[5])

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
        with self._exchange():
            runner = self._waiting()
            try:
                runner.ask(request, given)
            except OSError as error:
                raise self._lost() from error
            drain = Drain({runner.out: outputs[0], runner.err: outputs[1]}, self._control.fileno(), flood)
            if request["op"] == "python":
                drain.or_early(runner.done, runner.says_done)
            if not drain.run(timeout, self._stop):
                raise SandboxError(f"a jail did not end a program within {drain.PATIENCE_S:g} s")
            return self._outcome(runner), drain

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """One request: what interrupts it half-way ends the jail, whose next word would answer another."""
        with self._lock:
            if self._closed:
                raise SandboxError("the jail is closed: open another")
            finished = False
            try:
                yield
                finished = True
            finally:
                if not finished:
                    self._end()

    def _outcome(self, runner: Runner) -> Outcome:
        if runner.exit_code is None:
            return self._ended()
        self._owed = True
        if (early := runner.outcome()) is None:
            return self._settled()._replace(exit_code=runner.exit_code, signal=None, oom=False)
        if runner.number:
            # a jail that is used more than once: let init prepare it for the next request
            self._stop()
        else:
            runner.dismiss()
        return early

    def _waiting(self) -> Runner:
        """The runner of the next request, once init has one."""
        if self._owed:
            self._settled()
        if self._runner is None:
            if not self._readable(0):
                self._tell({"op": "next"})
            self._take_runner(*self._frame())
        assert self._runner is not None
        return self._runner

    def _settled(self) -> Outcome:
        """Make init end a request that was over early, and hear what it tells of it."""
        self._stop()
        return self._ended()

    def _ended(self) -> Outcome:
        """Hear how the request ended."""
        said = _decoded(self._said())
        self._over()
        return said

    def pack(self, most: float) -> bytes | None:
        """The workspace as a tar stream; None for one that is too long to be sent at once.

        Init writes it: no process is made for it. Raises SandboxError, also where it takes `most` seconds.
        """
        with self._exchange(), contextlib.ExitStack() as stack:
            packed = os.memfd_create("packed", os.MFD_CLOEXEC)
            stack.callback(os.close, packed)
            # a request that was over early is ended first
            over = self._served if self._owed else None
            self._tell({"op": "pack", "run": over}, [packed])
            while (said := self._said(most)) not in (outcome_record.PACKED, outcome_record.TOO_LONG):
                # init had ended it already
                self._expect(self._owed)
                _decoded(said)
                self._over()
            if self._owed:
                self._over()
            return os.pread(packed, os.fstat(packed).st_size, 0) if said == outcome_record.PACKED else None

    def _over(self) -> None:
        """Init has told the end of the request, or knows that it need not."""
        self._owed = False
        self._drop_runner()

    def _said(self, most: float | None = None) -> bytes:
        """What init says next, in the time that is given; a runner that it announces before is kept."""
        while True:
            if most is not None and not self._readable(most):
                raise SandboxError(f"a jail did not answer within {most:g} s")
            data, fds = self._frame()
            if data != outcome_record.READY:
                self._expect(not fds)
                return data
            self._take_runner(data, fds)

    def _take_runner(self, data: bytes, fds: list[int]) -> None:
        self._expect(data == outcome_record.READY and len(fds) == 5 and self._runner is None)
        self._served += 1
        self._runner = Runner(fds, self._served)

    def _frame(self) -> tuple[bytes, list[int]]:
        """What init says next: as many bytes as a word has, and descriptors."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self._control, outcome_record.SIZE, 8, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise self._lost() from error
        if not data:
            raise self._lost()
        return data, fds

    def _expect(self, holds: bool) -> None:
        if not holds:
            raise SandboxError("a jail answered nonsense (it said what it was not asked for)")

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    @property
    def alive(self) -> bool:
        # the pidfd of a process that ended is readable
        return not self._closed and not select.select([self._init], [], [], 0)[0]

    def _lost(self) -> SandboxError:
        return SandboxError(f"the jail ended ({self._last_words()}); open another, or is memory short?")

    def _tell(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            message.send(self._control, request, fds)
        except OSError as error:
            raise self._lost() from error

    def _stop(self) -> None:
        """Have init end the request that is under way."""
        with contextlib.suppress(OSError):
            message.send(self._control, {"op": "kill", "run": self._served})

    def close(self) -> None:
        """Kill every process of the jail, and with the last its mounts. Idempotent."""
        if not self._lock.acquire(blocking=False):
            with contextlib.suppress(OSError):
                # wakes the thread that waits in `call`
                self._control.shutdown(socket.SHUT_RDWR)
            self._lock.acquire()
        try:
            self._end()
        finally:
            self._lock.release()

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
        self._drop_runner()
        if self.on_close is not None:
            self.on_close()

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None


def _decoded(data: bytes) -> Outcome:
    try:
        return outcome_record.decode(data)
    except ValueError as problem:
        raise SandboxError(f"a jail answered nonsense ({problem})") from problem


def checked(received: tuple[dict[str, Any], list[int]]) -> tuple[dict[str, Any], list[int]]:
    """The answer, unless it names a layer that failed: then SandboxError."""
    reply, _ = received
    if "layer" in reply:
        raise cannot_isolate(reply["layer"], reply["errno"], reply["detail"])
    return received
