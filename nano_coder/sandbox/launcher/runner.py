"""One request of a jail: a program, Python source, or a file operation by trusted code.

Forked by init before the request is known, so that the first page faults are over when it comes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from typing import Any, NoReturn

from . import become, files, init, interpret, kernel, message, probe, word

BEGAN = struct.Struct("=BQ")
"""what a runner begins, and the bytes of memory that all its processes may hold together"""
OPERATION, PROGRAM, PYTHON = range(3)
_KINDS = {"run": PROGRAM, "python": PYTHON}


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
        if request["op"] == "streams":
            # most often long before the request
            _take_streams(fds)
            init.close_all_but({0, 1, 2, control.fileno(), report})
            interpret.make_ready()
        elif request["op"] != "kill":  # one that came too late
            break
    control.close()
    _serve(request, fds, report)


def _serve(request: dict[str, Any], fds: list[int], report: int) -> NoReturn:
    kind, memory_bytes = _KINDS.get(request["op"], OPERATION), request["memory_bytes"]
    try:
        # until the program begins, it is trusted code that init watches
        if kind == OPERATION:
            os.write(report, BEGAN.pack(OPERATION, memory_bytes))
        if request["unpack"]:
            _unpack(fds.pop(0))
    except OSError as error:
        if kind != OPERATION:
            os.write(report, BEGAN.pack(OPERATION, memory_bytes))
        _refuse(report, error, word.UNFIT)
    if fds:
        os.dup2(fds[0], 0)
        os.close(fds[0])
    if kind == OPERATION:
        try:
            _operate(request)
        except OSError as error:
            _refuse(report, error, word.REFUSED)
        os._exit(0)
    os.write(report, BEGAN.pack(kind, memory_bytes))
    kernel.drop_capabilities()
    become.limit(request["rlimits"])
    if kind == PROGRAM:
        become.reset_signals()
        become.execute(request["argv"], request["env"])
    pipe = os.fstat(report)
    interpret.run(request, lambda code: _say_done(report, pipe, code))


def _refuse(report: int, error: OSError, status: int) -> NoReturn:
    os.write(report, struct.pack("=H", error.errno or errno.EIO) + (error.strerror or str(error)).encode())
    os._exit(status)


def refusal(said: bytes) -> tuple[int, str] | None:
    """What `_refuse` said, if it did."""
    if len(said) < 2:
        return None
    return struct.unpack("=H", said[:2])[0], said[2:].decode(errors="backslashreplace")


def _rehearse() -> None:
    """Take the steps of a request without their effect: their page faults are over before one comes."""
    null = os.open(os.devnull, os.O_RDWR)
    saved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1, 2)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(theirs, {"op": "rehearsal", "env": {"PATH": "/bin"}}, [null, null])
        received = message.receive(ours)
    _take_streams(received[1] if received else [])
    kernel.set_capabilities(*init.KEPT)
    become.limit({"RLIMIT_CORE": 0})  # as it will be in any case
    interpret.rehearse()
    for number, fd in enumerate(saved):
        os.dup2(fd, number)
        os.close(fd)
    os.close(null)


def _unpack(packed: int) -> None:
    """Make the workspace what a stream holds."""
    root = os.open("/work", os.O_PATH | os.O_DIRECTORY)
    with open(packed, "rb") as source:
        files.clear("/work")
        files.unpack(root, source)
        os.chmod("/work", 0o755)
    os.close(root)


def _operate(request: dict[str, Any]) -> None:
    """A file operation, from standard input or to standard output."""
    if request["op"] != "pack":
        kernel.drop_capabilities()
    root = os.open("/work", os.O_PATH | os.O_DIRECTORY)
    if request["op"] == "read":
        files.read(root, request["path"], 1)
    elif request["op"] == "write":
        files.write(root, request["path"], 0)
    elif request["op"] == "pack":
        with open(1, "wb", closefd=False) as target:
            files.pack("/work", target)
    elif request["op"] == "probe":
        with open(1, "w", closefd=False) as target_text:
            json.dump(probe.attempts(request["secret"]), target_text)


def _say_done(report: int, pipe: os.stat_result, code: int) -> None:
    # the program may have closed it, or put another file there: then init sees the end itself
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(report), pipe):
            os.write(report, bytes([code]))


def _take_streams(fds: list[int]) -> None:
    """Make these descriptors standard output and error, and close them; standard input is empty."""
    null = os.open(os.devnull, os.O_RDONLY)
    # above the standard three, so that no copy overwrites one that is still needed
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (null, *fds)]
    for fd in (null, *fds):
        os.close(fd)
    for number, fd in enumerate(held):
        os.dup2(fd, number)
        os.close(fd)
