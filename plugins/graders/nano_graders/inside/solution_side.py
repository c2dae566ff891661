"""The solution's side: imports the artifact and calls its functions for the tests in the other jail.

No expected value is in this jail. The artifact shares the process and may do anything to it: a forged answer
has to be right.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import socket
import sys
import types
from typing import Any

from nano_coder.grading.inside.report import ROOT, load, write_files

from .connection import ConnectionBroken, Disconnected, Peer
from .stand_ins import class_node
from .value_codec import Crossing, NotPlain

LONGEST_PRINT = 1 << 20


class Solver(Peer):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.serve = self._serve
        self._module: types.ModuleType | None = None
        self._target = ""
        self._printed = Printed()
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
            self._printed, encoding="utf-8", errors="surrogateescape", write_through=True
        )

    def prepare(self, job: dict[str, Any]) -> None:
        """Write the files, and put the target's folder last on sys.path, where it shadows nothing."""
        write_files(ROOT, job["files"])
        self._target = job["target"]
        with contextlib.suppress(ValueError, OSError):
            seconds = int(job["cpu_seconds"])
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))

    def crossing(self) -> Crossing:
        """A Crossing that packs the solution's results as plain values."""
        return Crossing(self._lend, self._borrow, carry=True)

    def _serve(self, message: dict[str, Any]) -> dict[str, Any]:
        answer = self._answer(message)
        if printed := self._printed.take():
            answer["o"] = printed
        return answer

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["ask"] == "describe":
            return self._describe(message["names"])
        if message["ask"] == "call":
            return self.answer(message, getattr(self._module, message["name"]))
        return self.serve_lent(message)

    def _describe(self, names: list[str]) -> dict[str, Any]:
        """Import the artifact, and describe its names."""
        try:
            if self._module is None:
                self._module = load(ROOT, self._target)
            return {"has": {name: found for name in names if (found := self._kind(name)) is not None}}
        except ConnectionBroken:
            raise
        except BaseException as error:
            return self.pack_error(error)

    def _kind(self, name: str) -> dict[str, Any] | None:
        try:
            value = getattr(self._module, name)
        except AttributeError:
            return None
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": class_node(value)}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if not isinstance(value, type) and callable(value):
            return {"function": str(getattr(value, "__doc__", None) or "")[:10_000]}
        try:
            return {"value": self.crossing().pack(value)}
        except NotPlain as refused:
            return {"refused": str(refused)}


class Printed(io.BytesIO):
    """Collects what the solution prints, for tests that read it; keeps the beginning."""

    def close(self) -> None:
        """Does nothing: a solution may close or replace its streams."""

    def write(self, data: Any) -> int:
        if self.tell() < LONGEST_PRINT:
            super().write(data)
        return len(data)

    def take(self) -> str:
        if self.closed or not self.tell():
            return ""
        text = self.getvalue().decode("utf-8", "replace")
        self.seek(0)
        self.truncate()
        return text

    def fileno(self) -> int:
        return 1


def connect(*, quiet: int) -> socket.socket:
    """The connection, received as stdin; standard streams up to number `quiet` become /dev/null."""
    sock = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(quiet + 1):
        os.dup2(null, fd)
    return sock


def main() -> None:
    solver = Solver(connect(quiet=2))
    try:
        solver.prepare(solver.receive())
        while True:
            solver.reply(solver.receive())
    except Disconnected:
        pass
