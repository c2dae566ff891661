"""One end of the connection between two jails: requests and answers; either side may ask, and nested so.

A message is a length and JSON. Whoever asks serves what the other side asks meanwhile (a function that was
passed as an argument is called back so).
"""

from __future__ import annotations

import builtins
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from .wire import MALFORMED, Crossing, NotPlain

LONGEST = 1 << 25
"""bytes of one message"""
_LENGTH = struct.Struct("!I")


class Gone(Exception):
    """The other side has hung up."""


class Late(Exception):
    """The other side did not answer in time."""


class Forged(Exception):
    """What came is no message."""


class Unsendable(NotPlain):
    """An argument of ours that is no plain data."""


class Peer:
    """Serves requests by name and asks for things; values cross by `Crossing`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.patience: float | None = None
        """seconds of wall time for which an answer is awaited"""
        self._lent: list[Any] = []
        self._classes: dict[str, type[BaseException]] = {}
        self.serve: Callable[[dict[str, Any]], dict[str, Any]] = self.serve_lent

    # ------------------------------------------------------------------------------------ messages

    def send(self, message: dict[str, Any]) -> None:
        try:
            data = json.dumps(message).encode()
        except MALFORMED as error:
            raise NotPlain(f"something that cannot be written down ({error})") from error
        if len(data) > LONGEST:
            raise NotPlain("something too long to send")
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise Gone from error

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > LONGEST:
            raise Forged(f"a message of {length} bytes")
        data = self._exactly(length, deadline)
        try:
            message = json.loads(data)
        except MALFORMED as error:
            raise Forged(repr(data[:80])) from error
        if type(message) is not dict:
            raise Forged(repr(data[:80]))
        return message

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        pieces = []
        while size:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._sock], [], [], left)[0]:
                    raise Late
            try:
                piece = self._sock.recv(min(size, 1 << 20))
            except OSError as error:
                raise Gone from error
            if not piece:
                raise Gone
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises Gone, Late, Forged, and NotPlain for a message that cannot be sent."""
        self.send(message)
        while True:
            answer = self.receive(None if self.patience is None else time.monotonic() + self.patience)
            if "ask" not in answer:
                return answer
            self.reply(answer)

    def reply(self, message: dict[str, Any]) -> None:
        """Serve a request, and say what came of it."""
        answer = self.serve(message)
        try:
            self.send(answer)
        except NotPlain as refused:
            self.send({"p": str(refused)})

    # ------------------------------------------------------------------------------ lent functions

    def crossing(self) -> Crossing:
        return Crossing(self._lend, self._borrow)

    def _lend(self, value: Any, _: str) -> int:
        self._lent.append(value)
        return len(self._lent) - 1

    def _borrow(self, number: int, tag: str) -> Any:
        if type(number) is not int:
            raise TypeError("no number")
        if tag == "N":
            return self._borrowed_iterator(number)

        def lent(*args: Any, **kwargs: Any) -> Any:
            return self.call({"ask": "lent", "number": number}, args, kwargs)

        return lent

    def _borrowed_iterator(self, number: int) -> Iterator[Any]:
        while True:
            held = self.call({"ask": "next", "number": number}, (), {})
            if not held:
                return
            yield held[0]

    def serve_lent(self, message: dict[str, Any]) -> dict[str, Any]:
        """Call what was lent."""
        number = message.get("number")
        if type(number) is not int or not 0 <= number < len(self._lent):
            raise Forged("nothing was lent under this number")
        lent = self._lent[number]
        if message.get("ask") == "next":
            # a list of the next item, or of nothing
            return self.answer(message, lambda: [item for _, item in zip((None,), lent, strict=False)])
        return self.answer(message, lent)

    # --------------------------------------------------------------------------------------- calls

    def call(self, message: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the other side's function returns; what it did to mutable arguments is done to ours."""
        crossing = self.crossing()
        try:
            packed = {"a": [crossing.pack(item) for item in args], "k": crossing.pack(kwargs)}
        except NotPlain as refused:
            raise Unsendable(str(refused)) from refused
        answer = self.request({**message, **packed})
        if type(printed := answer.get("o")) is str:
            sys.stdout.write(printed)
        try:
            self.take_changes(crossing, answer.get("w", []))
            if "v" in answer:
                return crossing.unpack(answer["v"])
            error = self.error(answer)
        except MALFORMED as problem:
            raise Forged(str(answer)[:80]) from problem
        raise error

    def take_changes(self, crossing: Crossing, changes: Any) -> None:
        """Do to our arguments what the other side did to them. Raises one of MALFORMED."""
        crossing.apply(changes)

    def answer(self, message: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
        """Call our function as the other side asks, and pack what comes of it."""
        crossing = self.crossing()
        try:
            args = [crossing.unpack(node) for node in message["a"]]
            kwargs = crossing.unpack(message["k"])
            before = crossing.remember()
        except MALFORMED as problem:
            raise Forged(str(message)[:80]) from problem
        try:
            value = function(*args, **kwargs)
        except (Gone, Late, Forged):
            raise
        except BaseException as error:  # SystemExit and skips included: each is an answer to report
            return {"w": _told_changes(crossing, before), **self.pack_error(error)}
        try:
            return {"w": crossing.changes(before), "v": crossing.pack(value)}
        except NotPlain as refused:
            return {"p": str(refused)}

    # -------------------------------------------------------------------------------------- errors

    def pack_error(self, error: BaseException) -> dict[str, Any]:
        """An exception as its class, what that descends from among the builtin ones, and its arguments."""
        kind = type(error)
        base = next(c.__name__ for c in kind.__mro__ if getattr(builtins, c.__name__, None) is c)
        crossing = self.crossing()
        try:
            args = [crossing.pack(item) for item in error.args]
        except NotPlain:
            args = [_text(error)]
        return {"e": [kind.__name__, base, args]}

    def error(self, answer: dict[str, Any]) -> BaseException:
        """The exception of an answer without a value. Raises one of MALFORMED."""
        if "p" in answer:
            return NotPlain(str(answer["p"])[:80])
        name, base, args = answer["e"]
        crossing = self.crossing()
        return self.exception_class(str(name), str(base))(*[crossing.unpack(item) for item in args])

    def exception_class(self, name: str, base: str) -> type[BaseException]:
        """The builtin class, or one made for the name."""
        known: type[BaseException] = getattr(builtins, base)
        if not issubclass(known, BaseException):
            raise TypeError(base)
        if name == base:
            return known
        key = f"{name}:{base}"
        if key not in self._classes:
            self._classes[key] = type(name, (known,), {"__module__": "solution"})
        return self._classes[key]


def _told_changes(crossing: Crossing, before: list[list[Any]]) -> list[Any]:
    try:
        return crossing.changes(before)
    except NotPlain:
        return []


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""
