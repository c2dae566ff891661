"""The solution's side: loads the artifact and calls its functions for the tests, which are elsewhere.

No expected value is ever in this jail. The artifact shares the process, so that whatever it does to it is
its own loss: a forged answer has to be right.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import resource
import socket
import sys
import types
from typing import Any

from .peer import Forged, Gone, Late, Peer
from .wire import NotPlain

ROOT = "/work"
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
        """Put the files there, the target's folder last on the path: it shadows nothing."""
        write_files(ROOT, job["files"])
        self._target = job["target"]
        with contextlib.suppress(ValueError, OSError):
            seconds = int(job["cpu_seconds"])
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))

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
        """Import the artifact: what it has under each name."""
        try:
            if self._module is None:
                self._module = load(ROOT, self._target)
            return {"has": {name: found for name in names if (found := self._kind(name)) is not None}}
        except (Gone, Late, Forged):
            raise
        except BaseException as error:
            return self.pack_error(error)

    def _kind(self, name: str) -> dict[str, Any] | None:
        try:
            value = getattr(self._module, name)
        except AttributeError:
            return None
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": self.pack_error(_blank(value))["e"][:2]}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if not isinstance(value, type) and callable(value):
            return {"function": str(getattr(value, "__doc__", None) or "")[:10_000]}
        try:
            return {"value": self.crossing().pack(value)}
        except NotPlain as refused:
            return {"refused": str(refused)}


class Printed(io.BytesIO):
    """What the solution prints, for tests that read it; the beginning only where it is much."""

    def write(self, data: Any) -> int:
        if self.tell() < LONGEST_PRINT:
            super().write(data)
        return len(data)

    def take(self) -> str:
        if not self.tell():
            return ""
        text = self.getvalue().decode("utf-8", "replace")
        self.seek(0)
        self.truncate()
        return text

    def fileno(self) -> int:
        return 1


def _blank(kind: type[BaseException]) -> BaseException:
    return kind.__new__(kind)


def module_name(root: str, target: str) -> str:
    """The name under which tests import the target; its folder comes last on the path."""
    parts = target.removesuffix(".py").split("/")
    folder = root
    while len(parts) > 1 and not os.path.exists(os.path.join(folder, parts[0], "__init__.py")):
        folder = os.path.join(folder, parts.pop(0))
    sys.path += [place for place in dict.fromkeys((folder, root)) if place not in sys.path]
    return ".".join(parts)


def load(root: str, target: str) -> types.ModuleType:
    """The target as a module, whatever else has its name."""
    name = module_name(root, target)
    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    spec: Any = importlib.util.spec_from_file_location(name, os.path.join(root, target))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def write_files(root: str, files: dict[str, str]) -> None:
    """Texts by path; a surrogate stands for a byte that is no UTF-8."""
    for path, text in files.items():
        place = os.path.join(root, path)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)


def connect(*, quiet: int) -> socket.socket:
    """The connection, which came as stdin; the streams up to number `quiet` lead nowhere from here on."""
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
    except Gone:
        pass
