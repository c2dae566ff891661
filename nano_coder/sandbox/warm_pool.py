"""Launchers, their jails and the pool of warm jails, as the agent sees them: start, request, collect, kill.

Jails are used once, and created in advance by a launcher process without secrets. Nothing of a task enters a
jail before it is taken. All callers of this process with the same root plan share one pool.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nano_coder.sandbox.jail_request import Drain, Output, RunnerClient
from nano_coder.sandbox.launcher import cgroup, message
from nano_coder.sandbox.launcher.message import RequestOutcome
from nano_coder.sandbox.root_plan import cannot_isolate
from nano_shared.errors import SandboxError
from nano_shared.process import own_python

_START = "import sys; sys.path.insert(0, sys.argv[1]); from launcher.zygote import main; main()"
_PATIENCE_S = 30.0


def readable(source: int | socket.socket, seconds: float = 0.0) -> bool:
    """Whether there is something to read within so many seconds; also for descriptors above 1,023, which a
    process with many connections has and `select` does not take."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Launcher:
    """One launcher process, which creates jails: separate from the agent, with an empty environment."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """`spec` describes the root. Raises SandboxError, with the layer and the remedy, if the root cannot
        be built."""
        self._lock = threading.Lock()
        self._closed = False
        # a name of our own: other processes, also of other pid namespaces, may have groups beside ours
        name = f"{cgroup.PREFIX}{secrets.token_hex(8)}"
        self._group = spec["group"] and {**spec["group"], "name": name}
        self.made = 0
        """number of jails created so far"""
        self._control, theirs = socket.socketpair()
        self._errors = os.memfd_create("launcher-errors")
        with theirs:
            self._process = subprocess.Popen(
                own_python("-I", "-S", "-c", _START, str(Path(__file__).parent)),
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
            """whether its jails have a control group"""
        except (SandboxError, OSError) as error:
            lost = error if isinstance(error, SandboxError) else self._ended_error()
            self.close()
            raise lost from error

    def make(self, room: dict[str, int]) -> JailProcess:
        """A new jail with a workspace of this size. Raises SandboxError if a layer fails."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox launcher is closed")
            try:
                message.send(self._control, room)
                connection, init = self._answer()[1]
            except OSError as error:
                raise self._ended_error() from error
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
            raise self._ended_error()
        return checked(received)

    def _ended_error(self) -> SandboxError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return SandboxError(f"the sandbox launcher ended ({self.last_words()}); try again")

    def last_words(self) -> str:
        """The last line that the launcher or a jail's init wrote to stderr."""
        if self._closed:
            return "it is closed"
        record = os.pread(self._errors, 1 << 16, 0).decode(errors="backslashreplace").strip()
        return record.splitlines()[-1] if record else "it said nothing"

    @property
    def alive(self) -> bool:
        return not self._closed and self._process.poll() is None

    def retire(self) -> None:
        """Create no more jails; the process ends with its last jail."""
        with self._lock, contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the launcher, and with it every process and mount of its jails. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # shutdown before close: a forked copy of this process would keep the connection open
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
            self._control.close()
            self._process.kill()
            self._process.wait()
            if self._group is not None:
                with contextlib.suppress(OSError):
                    cgroup.ControlGroup(self._group).remove()
            os.close(self._errors)


class JailProcess:
    """The connection to one jail. Requests are served one at a time; `close` may be called from any
    thread."""

    def __init__(self, control: socket.socket, init: int, last_words: Any) -> None:
        """`init` is a pidfd of the jail's pid 1."""
        self._control = control
        self._init = init
        self._last_words = last_words
        self._lock = threading.Lock()
        self._closed = False
        self._runner: RunnerClient | None = None
        """the runner that waits for the next request, or has served one whose end init has not reported"""
        self._outcome_due = False
        """whether init still has to report the end of a request whose result the runner announced"""
        self._served = 0
        self.listener: socket.socket | None = None
        """listening socket inside the jail, for jails created with a port"""
        self.on_close: Callable[[], None] | None = None
        self.grouped = False
        """whether it has a control group of its own"""

    def begin(self, patience: float) -> None:
        """Wait until every layer is up. Raises SandboxError if one fails."""
        self._control.settimeout(patience)
        try:
            received = message.receive(self._control)
            self._control.settimeout(None)
        except OSError as error:
            raise self._ended_error() from error
        if received is None:
            raise self._ended_error()
        fds = checked(received)[1]
        self._runner = RunnerClient(fds[:5], 0)
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
    ) -> tuple[RequestOutcome, Drain]:
        """Run one request and collect its stdout and stderr.

        `given` are descriptors that it reads: a packed workspace if the request says so, then standard input.
        """
        with self._one_request():
            runner = self._ready_runner()
            try:
                runner.send(request, given)
            except OSError as error:
                raise self._ended_error() from error
            drain = Drain({runner.out: outputs[0], runner.err: outputs[1]}, self._control.fileno(), flood)
            if request["op"] == "python":
                drain.stop_early_on(runner.done, runner.read_announcement)
            if not drain.run(timeout, self.interrupt):
                raise SandboxError(f"a jail did not end a program within {drain.PATIENCE_S:g} s")
            return self._outcome(runner), drain

    @contextlib.contextmanager
    def _one_request(self) -> Iterator[None]:
        """One request at a time. An interrupted request kills the jail, since its reply would answer the next
        one."""
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

    def _outcome(self, runner: RunnerClient) -> RequestOutcome:
        if runner.exit_code is None:
            return self._receive_outcome()
        self._outcome_due = True
        if (early := runner.outcome()) is None:
            return self._finish_early_request()._replace(exit_code=runner.exit_code, signal=None, oom=False)
        if runner.number:
            # this jail is used more than once: let init prepare the next runner now
            self.interrupt()
        else:
            runner.dismiss()
        return early

    def _ready_runner(self) -> RunnerClient:
        """The runner for the next request; waits until init has one."""
        if self._outcome_due:
            self._finish_early_request()
        if self._runner is None:
            if not self._readable(0):
                self._send({"op": "next"})
            self._take_runner(*self._receive_record())
        assert self._runner is not None
        return self._runner

    def _finish_early_request(self) -> RequestOutcome:
        """Make init finish a request whose result was announced early, and return init's report."""
        self.interrupt()
        return self._receive_outcome()

    def _receive_outcome(self) -> RequestOutcome:
        """Wait for init's report of the end of the request."""
        record = decoded(self._next_record())
        self._forget_request()
        return record

    def pack(self, most: float) -> bytes | None:
        """The workspace as a tar stream; None if it is too long to be sent in one piece.

        Init itself writes it: no process is started. Raises SandboxError, also after `most` seconds.
        """
        with self._one_request(), contextlib.ExitStack() as stack:
            packed = os.memfd_create("packed", os.MFD_CLOEXEC)
            stack.callback(os.close, packed)
            # finish a request whose result was announced early
            over = self._served if self._outcome_due else None
            self._send({"op": "pack", "run": over}, [packed])
            while (record := self._next_record(most)) not in (message.PACKED, message.TOO_LONG):
                # init had already ended that request
                self._check_protocol(self._outcome_due)
                decoded(record)
                self._forget_request()
            if self._outcome_due:
                self._forget_request()
            return os.pread(packed, os.fstat(packed).st_size, 0) if record == message.PACKED else None

    def _forget_request(self) -> None:
        """Forget the runner: init has reported the end of its request, or need not."""
        self._outcome_due = False
        self._drop_runner()

    def _next_record(self, most: float | None = None) -> bytes:
        """The next record from init, within `most` seconds; a runner that init announces before it is
        kept."""
        while True:
            if most is not None and not self._readable(most):
                raise SandboxError(f"a jail did not answer within {most:g} s")
            data, fds = self._receive_record()
            if data != message.READY:
                self._check_protocol(not fds)
                return data
            self._take_runner(data, fds)

    def _take_runner(self, data: bytes, fds: list[int]) -> None:
        self._check_protocol(data == message.READY and len(fds) == 5 and self._runner is None)
        self._served += 1
        self._runner = RunnerClient(fds, self._served)

    def _receive_record(self) -> tuple[bytes, list[int]]:
        """The next record from init, of `OUTCOME_SIZE` bytes, and its descriptors."""
        try:
            data, fds, _, _ = socket.recv_fds(
                self._control, message.OUTCOME_SIZE, 8, socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise self._ended_error() from error
        if not data:
            raise self._ended_error()
        return data, fds

    def _check_protocol(self, holds: bool) -> None:
        if not holds:
            raise SandboxError("a jail answered nonsense (it said what it was not asked for)")

    def _readable(self, seconds: float) -> bool:
        return readable(self._control, seconds)

    @property
    def alive(self) -> bool:
        # the pidfd of a dead process is readable
        return not self._closed and not readable(self._init)

    def _ended_error(self) -> SandboxError:
        return SandboxError(f"the jail ended ({self._last_words()}); open another, or is memory short?")

    def _send(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            message.send(self._control, request, fds)
        except OSError as error:
            raise self._ended_error() from error

    def interrupt(self) -> None:
        """Ask init to kill the current request. Any thread may ask."""
        with contextlib.suppress(OSError):
            message.send(self._control, {"op": "kill", "run": self._served})

    def close(self) -> None:
        """Kill every process of the jail, which removes its mounts. Idempotent."""
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


def decoded(data: bytes) -> RequestOutcome:
    """The outcome of a record. Raises SandboxError for nonsense."""
    try:
        return message.decode_outcome(data)
    except ValueError as problem:
        raise SandboxError(f"a jail answered nonsense ({problem})") from problem


def checked(received: tuple[dict[str, Any], list[int]]) -> tuple[dict[str, Any], list[int]]:
    """The answer. Raises SandboxError if it reports a failed layer."""
    reply, _ = received
    if "layer" in reply:
        raise cannot_isolate(reply["layer"], reply["errno"], reply["detail"])
    return received


SIZE = min(2 * (os.cpu_count() or 1), 16)
JAILS_A_LAUNCHER = 10_000
"""jails after which a launcher is replaced"""
_NICE = 10
_CALM_S = 0.01

_pools: dict[str, Pool] = {}
_pools_lock = threading.Lock()


class Pool:
    """Keeps `size` jails of one root ready, from the second request on."""

    def __init__(self, spec: dict[str, Any], room: dict[str, int], size: int = SIZE) -> None:
        self._spec = spec
        self._room = room
        self.size = size
        self._ready: deque[JailProcess] = deque()
        self._changed = threading.Condition()
        self._launcher: Launcher | None = None
        self._launcher_lock = threading.Lock()
        self._retired: list[Launcher] = []
        self._refill: threading.Thread | None = None
        self.closed = False
        self._taken = 0

    def __len__(self) -> int:
        return len(self._ready)

    def ready(self) -> list[JailProcess]:
        """The jails that wait."""
        return list(self._ready)

    def take(self) -> JailProcess:
        """A jail of the usual size: a waiting one if there is one, else a new one. Raises SandboxError."""
        with self._changed:
            jail = self._waiting()
            self._taken += 1
            # the first request may be the only one
            if self._refill is None and self._taken > 1 and not self.closed:
                self._refill = threading.Thread(target=self._keep_filled, name="jails", daemon=True)
                self._refill.start()
            elif len(self._ready) <= self.size // 2:
                self._changed.notify()
        if jail is None:
            return self.make(self._room)
        # else the refilling thread is woken when this jail is closed: until then it would compete for the
        # processor
        jail.on_close = self._refill_soon
        return jail

    def _refill_soon(self) -> None:
        with self._changed:
            self._changed.notify()

    def make(self, room: dict[str, int], *, rehearse: bool = False) -> JailProcess:
        """A new jail with a workspace of this size.

        `rehearse`: the jail runs a request's steps in advance, which takes two milliseconds of processor time
        and makes its first answer a millisecond faster.
        """
        request, launcher = {**room, "rehearse": rehearse}, self._alive()
        try:
            return launcher.make(request)
        except SandboxError:
            if launcher.alive:
                raise
        return self._alive().make(request)

    def _waiting(self) -> JailProcess | None:
        """A waiting jail, or None; dead ones are dropped."""
        while self._ready:
            jail = self._ready.popleft()
            if jail.alive:
                return jail
            jail.close()
        return None

    def _alive(self) -> Launcher:
        """A live launcher; starts a new one if it died or has created enough jails."""
        with self._launcher_lock:
            if self.closed:
                raise SandboxError("the sandbox is closed")
            launcher = self._launcher
            if launcher is not None and launcher.alive and launcher.made < JAILS_A_LAUNCHER:
                return launcher
            if launcher is not None:
                launcher.retire()
                self._retired.append(launcher)
            for old in [old for old in self._retired if not old.alive]:
                old.close()
                self._retired.remove(old)
            self._launcher = Launcher(self._spec)
            return self._launcher

    def _keep_filled(self) -> None:
        # an ordinary user may raise its niceness but not lower it again
        calmer = max(_NICE, os.getpriority(os.PRIO_PROCESS, 0))
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), calmer)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closed or len(self._ready) < self.size)
                # creating a jail takes a core: wait while the jail that was just taken works, unless few are
                # left
                while len(self._ready) > self.size // 2 and self._changed.wait(_CALM_S):
                    pass
                if self.closed:
                    return
                calm = len(self._ready) >= self.size // 2
            try:
                jail = self.make(self._room, rehearse=calm)
            except SandboxError:
                # the next caller of `take` gets the error; do not retry before that
                with self._changed:
                    self._refill = None
                return
            with self._changed:
                if not self.closed:
                    self._ready.append(jail)
                    continue
            jail.close()

    def close(self) -> None:
        """Kill the launchers with all their jails, also those in use. Idempotent."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        with self._launcher_lock:
            for launcher in (*self._retired, *([self._launcher] if self._launcher else [])):
                launcher.close()
        while self._ready:
            self._ready.popleft().close()


def shared_pool(spec: dict[str, Any], room: dict[str, int]) -> Pool:
    """The pool of this process for this spec and size."""
    key = json.dumps([spec, room], sort_keys=True)
    with _pools_lock:
        pool = _pools.get(key)
        if pool is None or pool.closed:
            pool = _pools[key] = Pool(spec, room)
        return pool


@atexit.register
def close_pools() -> None:
    """Kill every launcher of this process. A later jail starts a new one."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()


# a fork has none of the threads, and must not use its parent's connections
os.register_at_fork(after_in_child=_pools.clear)
