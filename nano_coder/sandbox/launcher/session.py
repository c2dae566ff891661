"""The inside of a stateful session: keeps its state and serves one request after another on a socket.

A request and its answer carry the same nonce. An answer that comes twice, or with another nonce, is the end
of the session: the agent takes nothing that it did not ask for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from typing import Any, NoReturn, Protocol

from . import files, message

_WORK = "/work"


class Kept(Protocol):
    """What a session keeps between requests."""

    def run(self, source: str, stdin: int) -> dict[str, Any]:
        """Run one request with `stdin` to read from: `exit_code`, `signal`, whether it `ended` the session,
        `cpu_s` of processor time and `peak_bytes` of memory."""
        ...


def serve(kind: str) -> NoReturn:
    """Serve the socket that is our standard input until the other side hangs up or the program ends."""
    channel = _take_channel()
    kept = _kept(kind)
    while (received := message.receive(channel)) is not None:
        request, (stdin,) = received
        message.send(channel, {"nonce": request["nonce"], **_answered(kept, request, stdin)})
    os._exit(0)


def _take_channel() -> socket.socket:
    """The socket, where no program inherits it, and the streams that it brings as our output."""
    # high, so that a program that counts its descriptors finds none of ours among the low ones
    channel = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 200))
    received = message.receive(channel)
    if received is None:
        os._exit(0)
    # standard input too: the socket itself must not reach what the session starts
    streams = [os.open(os.devnull, os.O_RDONLY), *received[1]]
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    return channel


def _kept(kind: str) -> Kept:
    if kind == "shell":
        from .shell import Shell

        return Shell()
    from .repl import Interpreter

    return Interpreter()


def _answered(kept: Kept, request: dict[str, Any], stdin: int) -> dict[str, Any]:
    try:
        for name, text in request["files"].items():
            _write(name, text.encode("utf-8", "surrogatepass"))
    except OSError as error:
        os.close(stdin)
        return {"refused": [str(error.filename), error.strerror or str(error)]}
    try:
        return kept.run(request["source"], stdin)
    finally:
        with contextlib.suppress(OSError):  # the program may have closed it
            os.close(stdin)


def _write(name: str, data: bytes) -> None:
    path = os.path.join(_WORK, files.check_path(name))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
