"""One request of a jail: a program, Python source, or a file operation by trusted code.

Forked by init before the request is known, so that the first page faults are over when it comes. It gets its
request from the agent, and tells it when Python source is done: nobody passes anything on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import socket
import struct
import time
from typing import IO, Any, NamedTuple, NoReturn

from . import archive, exec_program, files, kernel, memory, message, outcome_record, probe, warm_python

BEGAN = struct.Struct("=BQdQQ")
"""what a runner begins, the bytes of memory that all its processes may hold together, the seconds of
processor time that it took to get ready, and what there was before"""
OPERATION, PROGRAM, PYTHON = range(3)
_KINDS = {"run": PROGRAM, "python": PYTHON}
WATCHED = ("/work", "/tmp", "/dev/shm")
"""file systems in memory that a program writes to"""
_REHEARSED = "/dev/shm"
_ENOUGH = 10
"""times, after which Python has adapted what it runs"""
WATCH_S = 0.05
"""between two looks at what a program holds; the first is so long after it began"""


class Lines(NamedTuple):
    """A runner's ends of what connects it with the agent, and with init; all of them descriptors."""

    out: int
    err: int
    done: int
    """pipe to the agent: a byte, the exit code, once Python source is done"""
    requests: int
    """socket on which the agent asks; closed before a program begins"""
    report: int
    """pipe to init: what it began, then how far it came"""
    timer: int
    """wakes init when a program has run for a while"""


def main(lines: Lines, limits: dict[str, int], *, rehearse: bool) -> NoReturn:
    """Serve the one request that comes. `limits` are those that every request has."""
    memory.programs().join()
    os.setsid()
    os.chdir("/work")
    kernel.drop_bounding_set()
    if rehearse:
        _rehearse()
    # ahead of the request, so that all is ready for it
    _take_streams(
        [lines.out, lines.err], {lines.done, lines.requests, lines.report, lines.timer, *memory.programs()}
    )
    warm_python.make_ready()
    exec_program.limit(limits)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, lines.requests) as requests:
        received = message.receive(requests)
    if received is None:
        os._exit(0)  # the agent hung up
    _serve(*received, lines)


def _serve(request: dict[str, Any], fds: list[int], lines: Lines) -> NoReturn:
    kind = _KINDS.get(request["op"], OPERATION)
    try:
        # until the program begins, it is trusted code that init watches
        if kind == OPERATION:
            _begin(OPERATION, request, lines)
        if request["unpack"]:
            _unpack(fds.pop(0))
    except OSError as error:
        if kind != OPERATION:
            _begin(OPERATION, request, lines)
        _refuse(lines.report, error, outcome_record.UNFIT)
    if fds:
        os.dup2(fds[0], 0)
        os.close(fds[0])
    if kind == OPERATION:
        try:
            _operate(request)
        except OSError as error:
            _refuse(lines.report, error, outcome_record.REFUSED)
        os._exit(0)
    _begin(kind, request, lines)
    for fd in (lines.report, lines.timer, *memory.programs()):
        if fd >= 0:
            os.close(fd)
    kernel.drop_capabilities()
    exec_program.limit(request["rlimits"])
    if kind == PROGRAM:
        exec_program.reset_own_signals()
        exec_program.execute(request["argv"], request["env"])
    pipe = os.fstat(lines.done)
    warm_python.run(request, lambda code: _say_done(lines.done, pipe, code))


def _begin(kind: int, request: dict[str, Any], lines: Lines) -> None:
    """Tell init, who reads it when the timer wakes it, or at the end: most programs are done before that."""
    # what trusted code unpacks is the workspace, and not the program's
    before = memory.before(() if kind == OPERATION else WATCHED)
    if kind != OPERATION:
        memory.programs().begin(before.stored + request["memory_bytes"])
    os.write(lines.report, BEGAN.pack(kind, request["memory_bytes"], time.process_time(), *before))
    kernel.set_timer(lines.timer, WATCH_S)


def _refuse(report: int, error: OSError, status: int) -> NoReturn:
    os.write(report, struct.pack("=H", error.errno or errno.EIO) + (error.strerror or str(error)).encode())
    os._exit(status)


def refusal(said: bytes) -> tuple[int, str] | None:
    """What `_refuse` said, if it did."""
    if len(said) < 2:
        return None
    return struct.unpack("=H", said[:2])[0], said[2:].decode(errors="backslashreplace")


def practise() -> None:
    """In the zygote, once: those steps of a request that leave no trace.

    What Python looks up and adapts at first use is then found by every process of every jail, and not on a
    page that each must copy to write it down.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for _ in range(_ENOUGH):
        timer = kernel.make_timer()
        kernel.set_timer(timer, 1)
        kernel.set_timer(timer, 0)
        os.close(timer)
        os.close(os.pidfd_open(os.getpid()))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            message.send(theirs, {"op": "practice", "env": {"PATH": "/bin"}}, [null])
            for fd in (message.receive(ours) or ({}, []))[1]:
                os.close(fd)
            theirs.sendall(outcome_record.encode(outcome_record.Outcome(exit_code=0)))
        BEGAN.unpack(BEGAN.pack(PYTHON, 1, time.process_time(), *memory.before(WATCHED)))
        exec_program.limit({"RLIMIT_CORE": 0})  # as it will be in any case
        for member in (reader := archive.Reader(io.BytesIO(_archive()))):
            archive.Member(files.check_path(member.name), *member[1:])
            b"".join(reader.contents())
        warm_python.rehearse()
    os.close(null)


def _rehearse() -> None:
    """Take the steps of a request without their effect: their page faults are over before one comes."""
    null = os.open(os.devnull, os.O_RDWR)
    saved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (0, 1, 2)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(theirs, {"op": "rehearsal", "env": {"PATH": "/bin"}}, [null, null])
        received = message.receive(ours)
    _take_streams(received[1] if received else [], None)
    kernel.set_capabilities(*exec_program.KEPT)
    exec_program.limit({"RLIMIT_CORE": 0})  # as it will be in any case
    _unpack_into(_REHEARSED, io.BytesIO(_archive()))
    files.clear(_REHEARSED)
    warm_python.rehearse()
    for number, fd in enumerate(saved):
        os.dup2(fd, number)
        os.close(fd)
    os.close(null)


def _archive() -> bytes:
    """Two small files."""
    out = io.BytesIO()
    for name in ("a", "b"):
        archive.write_member(out, archive.Member(name, archive.FILE, 0o644, 1))
        out.write(b"x")
        archive.write_padding(out, 1)
    archive.write_end(out)
    return out.getvalue()


def _unpack(packed: int) -> None:
    """Make the workspace what a stream holds."""
    with open(packed, "rb") as source:
        _unpack_into("/work", source)
    os.chmod("/work", 0o755)


def _unpack_into(folder: str, source: IO[bytes]) -> None:
    root = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    files.clear(folder)
    files.unpack(root, source)
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
        files.survey("/work", request["size"])
        with open(1, "wb", closefd=False) as target:
            files.pack("/work", target)
    elif request["op"] == "probe":
        with open(1, "w", closefd=False) as target_text:
            json.dump(probe.attempts(request["secret"]), target_text)


def _say_done(done: int, pipe: os.stat_result, code: int) -> bool:
    # the program may have closed it, or put another file there: then init sees the end itself
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(done), pipe):
            return os.write(done, bytes([code])) == 1
    return False


def _take_streams(fds: list[int], kept: set[int] | None) -> None:
    """Make these descriptors standard output and error; standard input is empty.

    Every other one is closed but those that are `kept` (below zero: none), unless that is None.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    # above the standard three, so that no copy overwrites one that is still needed
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (null, *fds)]
    for fd in (null, *fds):
        os.close(fd)
    for number, fd in enumerate(held):
        os.dup2(fd, number)
        os.close(fd)
    if kept is not None:
        exec_program.close_all_but({0, 1, 2, *(kept - {-1})})
