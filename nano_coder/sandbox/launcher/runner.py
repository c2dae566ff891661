"""One request of a jail: a program, Python source, or a file operation by trusted code.

Forked by init before the request is known, so that the first page faults are over when it comes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import socket
import struct
from typing import Any, NoReturn

from . import become, files, init, interpret, kernel, message, probe

_TREE_OPERATIONS = ("pack", "unpack")


def main(control: socket.socket, report: int, *, rehearse: bool) -> NoReturn:
    os.setsid()
    os.chdir("/work")
    become.reset_signals()
    kernel.drop_bounding_set()
    if rehearse:
        _rehearse()
    while True:
        received = message.receive(control)
        if received is None:
            os._exit(0)
        request, fds = received
        if request["op"] != "kill":  # one that came too late
            break
    control.close()
    tell(report, {"op": request["op"], "memory_bytes": request["memory_bytes"]})
    if request["op"] not in _TREE_OPERATIONS:
        kernel.drop_capabilities()
    if request["op"] == "run":
        _confine(request, fds, kept=set())
        become.execute(request["argv"], request["env"])
    if request["op"] == "python":
        _confine(request, fds, kept={report})
        pipe = os.fstat(report)
        interpret.run(request, lambda code: _say_done(report, pipe, code))
    try:
        _operate(request, fds)
    except OSError as error:
        tell(report, {"refused": [error.errno or errno.EIO, error.strerror or str(error)]})
        os._exit(1)
    os._exit(0)


def _rehearse() -> None:
    """Take the steps of a request without their effect: their page faults are over before one comes."""
    null = os.open(os.devnull, os.O_RDWR)
    saved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1, 2)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(theirs, {"op": "rehearsal", "env": {"PATH": "/bin"}}, [null, null, null])
        received = message.receive(ours)
    _take_streams(received[1] if received else [])
    kernel.set_capabilities(*init.KEPT)
    become.limit({"RLIMIT_CORE": 0})  # as it will be in any case
    interpret.rehearse()
    for number, fd in enumerate(saved):
        os.dup2(fd, number)
        os.close(fd)
    os.close(null)


def tell(report: int, record: dict[str, object]) -> None:
    os.write(report, json.dumps(record).encode() + b"\n")


def _operate(request: dict[str, Any], fds: list[int]) -> None:
    root = os.open("/work", os.O_PATH | os.O_DIRECTORY)
    data, out = fds[0], fds[1]
    if request["op"] == "read":
        files.read(root, request["path"], out)
    elif request["op"] == "write":
        files.write(root, request["path"], data)
    elif request["op"] == "pack":
        with open(out, "wb", closefd=False) as target:
            files.pack("/work", target)
    elif request["op"] == "unpack":
        with open(data, "rb", closefd=False) as source:
            files.clear("/work")
            files.unpack(root, source)
            os.chmod("/work", 0o755)
    else:
        with open(out, "w", closefd=False) as target_text:
            json.dump(probe.attempts(request["secret"]), target_text)


def _say_done(report: int, pipe: os.stat_result, code: int) -> None:
    # the program may have closed it, or put another file there: then init sees the end itself
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.fstat(report), pipe):
            return
        os.write(report, _last_word(code))


def _last_word(code: int) -> bytes:
    used, peak = 0.0, 0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used, peak = used + usage.ru_utime + usage.ru_stime, max(peak, usage.ru_maxrss * 1024)
    return struct.pack(init.DONE, code, used, peak)


def _confine(request: dict[str, Any], fds: list[int], kept: set[int]) -> None:
    """Standard streams and limits as a program of the user finds them."""
    _take_streams(fds)
    init.close_all_but({0, 1, 2, *kept})
    become.limit(request["rlimits"])


def _take_streams(fds: list[int]) -> None:
    """Make these descriptors the standard streams, and close them."""
    for number, fd in enumerate(fds):
        # above the standard three, so that no copy overwrites one that is still needed
        fds[number] = fcntl.fcntl(fd, fcntl.F_DUPFD, 10)
        os.close(fd)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
