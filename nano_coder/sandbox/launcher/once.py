"""One program in a jail whose pid 1 is not ours: started within limits, watched, and told of how it ended.

A foreign pid 1 passes on a signal as an exit code above 128, which a program can return by itself; it also
counts neither memory nor time.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
from typing import Any, NoReturn

from . import kernel, landlock, memory

WRITABLE = ("/work", "/tmp", "/dev/shm")
_WATCH_MS = 50


def main(asked: int, report: int, stop: int) -> None:
    """Run what the file `asked` says; a byte on `stop` kills it; `report` gets JSON objects, one a line."""
    with open(asked, "rb") as file:
        request = json.load(file)
    # should the machine run out of memory, a jail goes first; while /proc/self is still ours to write
    with open("/proc/self/oom_score_adj", "w") as badness:
        badness.write("1000")
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    _tell(report, {"began": True})
    pid = os.fork()
    if pid == 0:
        try:
            _become(request)
        finally:
            os._exit(126)
    oom = _watch(os.pidfd_open(pid), stop, request["memory_bytes"])
    status, used, peak = _end_everything(pid)
    code = os.waitstatus_to_exitcode(status)
    ending = {"exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}
    _tell(report, {**ending, "oom": oom, "cpu_s": used, "peak_bytes": peak})


def _tell(report: int, record: dict[str, object]) -> None:
    os.write(report, json.dumps(record).encode() + b"\n")


def _become(request: dict[str, Any]) -> NoReturn:
    # a group of its own: a program that signals its group must not reach us
    os.setsid()
    os.closerange(3, 1 << 20)
    if landlock.version():
        landlock.confine(writable=WRITABLE)
    for name, value in request["rlimits"].items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    argv = request["argv"]
    try:
        os.execvpe(argv[0], argv, request["env"])
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)


def _watch(ended: int, stop: int, memory_bytes: int) -> bool:
    """Wait for the program to end; kill all when asked to or when memory ran out. True when it was memory."""
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(stop, select.POLLIN)
    oom = False
    while True:
        events = {fd for fd, _ in poll.poll(_WATCH_MS)}
        if ended in events:
            return oom
        if events:
            _kill_all()
            poll.unregister(stop)
        elif not oom and memory.in_use() > memory_bytes and memory.proportional() > memory_bytes:
            oom = True
            _kill_all()


def _kill_all() -> None:
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end_everything(program: int) -> tuple[int, float, int]:
    """Kill and reap every process: the program's wait status, CPU seconds and the largest resident set."""
    status, used, peak = 0, 0.0, 0
    _kill_all()
    while True:
        try:
            pid, ended, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return status, used, peak
        used += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss * 1024)
        if pid == program:
            status = ended
