"""The inside of a jail that keeps its processes: a server that forks one child for each request.

It runs with the rights of the programs, for as long as the jail lives. At the end of a request only its child
is gone: what that started, and what lies in /tmp, stays. A request that the agent ends loses its session.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from . import exec_program, kernel, message, runner

_STANDSTILL_S = 0.2
_ROUNDS, _PAUSE_S = 500, 0.01
"""attempts to kill a session whose processes fork meanwhile; after them every process goes"""


def serve() -> NoReturn:
    """Serve the socket on standard input until the other side closes it."""
    # a high number, so that a program finds no descriptor of ours among the low ones
    channel = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 200))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    # so that what a request leaves behind is reaped here
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    while (received := message.receive(channel)) is not None:
        request, fds = received
        if request["op"] == "end":  # of a request that has ended meanwhile
            continue
        # a file that changes while it is packed makes no snapshot
        with _stopped() if request["op"] == "pack" else contextlib.nullcontext():
            outcome = _served(channel, request, fds)
        channel.sendall(message.encode_outcome(outcome))
    os._exit(0)


def _served(channel: socket.socket, request: dict[str, Any], fds: list[int]) -> message.RequestOutcome:
    report, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            runner.serve_forked(request, fds, theirs)
        finally:
            os._exit(70)
    for fd in (theirs, *fds):
        os.close(fd)
    ended = os.pidfd_open(pid)
    if not _wait(ended, channel):
        _kill_session(pid)
    _, status, usage = os.wait4(pid, 0)
    os.close(ended)
    _reap()
    os.set_blocking(report, False)
    with open(report, "rb", buffering=0) as said:
        refused = runner.refusal(said.read(message.OUTCOME_SIZE) or b"")
    exit_code, number = exec_program.exit_status(status)
    used, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
    return message.RequestOutcome(exit_code, number, False, used, peak, refused)


def _wait(ended: int, channel: socket.socket) -> bool:
    """Whether the request ended by itself; False if the agent ends it. Exits if the agent is gone."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(channel, select.POLLIN)
    if ended in {fd for fd, _ in poll.poll()}:
        return True
    if message.receive(channel) is None:
        os._exit(0)
    return False


def _kill_session(leader: int) -> None:
    for _ in range(_ROUNDS):
        if not (members := [pid for pid in _processes() if _session(pid) == leader]):
            return
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    exec_program.kill_all()


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    """All other processes stand still meanwhile."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        ours, until = (1, os.getpid()), time.monotonic() + _STANDSTILL_S
        while any(_state(pid)[0] in b"RSD" for pid in _processes() if pid not in ours):
            if time.monotonic() > until:
                break
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int | None:
    """Its session; None for one that has ended."""
    state, session = _state(pid)
    return None if state in b"ZX" else session


def _state(pid: int) -> tuple[bytes, int]:
    """Its state, as the kernel's letter, and its session."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return b"X", 0
    return fields[0], int(fields[3])


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
