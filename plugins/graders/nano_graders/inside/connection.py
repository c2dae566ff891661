"""One end of the connection between the two jails: nested requests and answers, in both directions.

A message is a length and JSON. While one side waits for an answer, it serves requests of the other: so
functions that were passed as arguments are called back.
"""

from __future__ import annotations

import functools
import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from .value_codec import MALFORMED, Crossing, NotPlain

LONGEST = 1 << 25
"""bytes of one message"""
_LENGTH = struct.Struct("!I")


class ConnectionBroken(Exception):
    """The other side can answer no more."""

    code = ""
    """its name in the reports of the tests' jail"""


class Disconnected(ConnectionBroken):
    """The other side has closed the connection."""

    code = "gone"


class AnswerTimeout(ConnectionBroken):
    """The other side did not answer in time."""

    code = "late"


class MalformedMessage(ConnectionBroken):
    """The other side sent bytes that are no message."""

    code = "forged"


class Unsendable(NotPlain):
    """An argument of our own call is not plain data."""


class Peer:
    """Sends and serves requests by name; values are packed by `Crossing`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.patience: float | None = None
        """seconds of wall time to wait for an answer; None: for ever"""
        self._lent: list[Any] = []
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
            raise Disconnected from error

    def receive(self, deadline: float | None = None) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > LONGEST:
            raise MalformedMessage(f"a message of {length} bytes")
        data = self._exactly(length, deadline)
        try:
            message = json.loads(data)
        except MALFORMED as error:
            raise MalformedMessage(repr(data[:80])) from error
        if type(message) is not dict:
            raise MalformedMessage(repr(data[:80]))
        return message

    def _exactly(self, size: int, deadline: float | None) -> bytes:
        pieces = []
        while size:
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._sock], [], [], left)[0]:
                    raise AnswerTimeout
            try:
                piece = self._sock.recv(min(size, 1 << 20))
            except OSError as error:
                raise Disconnected from error
            if not piece:
                raise Disconnected
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises ConnectionBroken, and NotPlain for an unsendable
        message."""
        self.send(message)
        while True:
            answer = self.receive(None if self.patience is None else time.monotonic() + self.patience)
            if "ask" not in answer:
                return answer
            self.reply(answer)

    def reply(self, message: dict[str, Any]) -> None:
        """Serve a request and send the result."""
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
        """A proxy for an object of the other side; with tag "h", our own object that comes back."""
        if type(number) is not int or number < 0:
            raise TypeError("no number")
        if tag == "h":
            return self._lent[number]

        def ask(how: str, *args: Any, **kwargs: Any) -> Any:
            return self.call({"ask": "lent", "number": number, "how": how}, args, kwargs)

        return _BORROWED[tag](ask)

    def serve_lent(self, message: dict[str, Any]) -> dict[str, Any]:
        """Perform an operation on an object of ours that was lent to the other side."""
        number, how = message.get("number"), message.get("how")
        if type(number) is not int or not 0 <= number < len(self._lent) or how not in _LENT:
            raise MalformedMessage("nothing was lent under this number")
        lent = self._lent[number]
        return self.answer(message, lambda *args, **kwargs: _LENT[how](lent, *args, **kwargs))

    # --------------------------------------------------------------------------------------- calls

    def call(self, message: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the other side; changes to mutable arguments are applied to ours."""
        crossing = self.crossing()
        try:
            packed = {"a": [crossing.pack(item) for item in args], "k": crossing.pack(kwargs)}
        except NotPlain as refused:
            raise Unsendable(str(refused)) from refused
        answer = self.request({**message, **packed})
        if type(printed := answer.get("o")) is str:
            sys.stdout.write(printed)
        if "x" in answer:
            self.deceived(str(answer["x"]))
        try:
            self.take_changes(crossing, answer.get("w", []))
            if "v" in answer:
                return crossing.unpack(answer["v"])
            error = self.error(answer)
        except MALFORMED as problem:
            raise MalformedMessage(str(answer)[:80]) from problem
        raise error

    def deceived(self, kind: str) -> None:
        """Called for a class of the other side whose comparisons lie."""

    def take_changes(self, crossing: Crossing, changes: Any) -> None:
        """Apply the other side's changes to our arguments. Raises one of MALFORMED."""
        crossing.apply(changes)

    def answer(self, message: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
        """Call our function for the other side, and pack the result."""
        crossing = self.crossing()
        try:
            args = [crossing.unpack(node) for node in message["a"]]
            kwargs = crossing.unpack(message["k"])
            before = crossing.remember()
        except MALFORMED as problem:
            raise MalformedMessage(str(message)[:80]) from problem
        try:
            value = function(*args, **kwargs)
        except ConnectionBroken:
            raise
        except BaseException as error:  # SystemExit and skips included: each is an answer to report
            return {"w": _plain_changes(crossing, before), **self.pack_error(error)}
        try:
            reply = {"w": crossing.changes(before), "v": crossing.pack(value)}
        except (NotPlain, *MALFORMED) as refused:  # also too long for the memory, or nested too deeply
            reply = {"p": str(refused)}
        return reply if crossing.deceit is None else {**reply, "x": crossing.deceit}

    # -------------------------------------------------------------------------------------- errors

    def pack_error(self, error: BaseException) -> dict[str, Any]:
        """An exception as message data, without the parts that cannot be sent."""
        return {"e": self.crossing().pack_error(error)}

    def error(self, answer: dict[str, Any]) -> BaseException:
        """The exception in an answer without a value. Raises one of MALFORMED."""
        if "p" in answer:
            return NotPlain(str(answer["p"])[:80])
        return self.crossing().unpack_error(answer["e"])


def _plain_changes(crossing: Crossing, before: list[list[Any]]) -> list[Any]:
    try:
        return crossing.changes(before)
    except NotPlain:
        return []


# ------------------------------------------------------------- what is lent, and what stands for it


def _borrowed_iterator(ask: Callable[..., Any]) -> Iterator[Any]:
    while answer := ask("next"):
        yield answer[0]


def _borrowed_function(ask: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(ask)(functools.partial(ask, "call"))


class _Iterable:
    borrowed = "J"

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("iter"))


_BORROWED: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "N": _borrowed_iterator, "F": _borrowed_function, "J": _Iterable,
}  # fmt: skip
_LENT: dict[str, Callable[..., Any]] = {
    "call": lambda lent, *args, **kwargs: lent(*args, **kwargs),
    "iter": iter,
    "next": lambda lent: [item for _, item in zip((None,), lent, strict=False)],
}
"""operation -> function that performs it on a lent object"""
