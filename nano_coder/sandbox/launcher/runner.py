"""One request of a jail: a program, Python source, or a file operation by trusted code.

Forked by init before the request is known, so that the first page faults are over when it comes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import signal
import socket
from typing import Any, NoReturn

from . import files, init, interpret, kernel, message, probe

_TREE_OPERATIONS = ("pack", "unpack")


def main(control: socket.socket, report: int) -> NoReturn:
    os.setsid()
    interpret.warm_up()
    while True:
        received = message.receive(control)
        if received is None:
            os._exit(0)
        request, fds = received
        if request["op"] != "kill":  # one that came too late
            break
    control.close()
    tell(report, {"memory_bytes": request["memory_bytes"]})
    if request["op"] not in _TREE_OPERATIONS:
        kernel.drop_capabilities()
    if request["op"] in ("run", "python"):
        os.close(report)
        _confine(request, fds)
        if request["op"] == "run":
            _exec(request["argv"], request["env"])
        interpret.run(request)
    try:
        _operate(request, fds)
    except OSError as error:
        tell(report, {"refused": [error.errno or errno.EIO, error.strerror or str(error)]})
        os._exit(1)
    os._exit(0)


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


def _confine(request: dict[str, Any], fds: list[int]) -> None:
    """Standard streams, limits and signals as a program of the user finds them."""
    for number, fd in enumerate(fds):
        # above the standard three, so that no copy overwrites one that is still needed
        fds[number] = fcntl.fcntl(fd, fcntl.F_DUPFD, 10)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    init.close_all_but({0, 1, 2})
    _limit(request["rlimits"])
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and not 32 <= number < 34:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.chdir("/work")


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def _exec(argv: list[str], env: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]!r}: {error.strerror}\n".encode(errors="backslashreplace"))
        os._exit(127 if error.errno == errno.ENOENT else 126)
