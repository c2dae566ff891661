"""One end of the connection between two jails: requests and answers; either side may ask, and nested so.

A message is a length and JSON. Whoever asks serves what the other side asks meanwhile (a function that was
passed as an argument is called back so).
"""

from __future__ import annotations

import functools
import json
import select
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from .value_codec import MALFORMED, Crossing, NotPlain

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
        """What does here what the other side's object does there; with tag "h", our own that comes back."""
        if type(number) is not int or number < 0:
            raise TypeError("no number")
        if tag == "h":
            return self._lent[number]

        def ask(how: str, *args: Any, **kwargs: Any) -> Any:
            return self.call({"ask": "lent", "number": number, "how": how}, args, kwargs)

        return _BORROWED[tag](ask)

    def serve_lent(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked of something that was lent."""
        number, how = message.get("number"), message.get("how")
        if type(number) is not int or not 0 <= number < len(self._lent) or how not in _LENT:
            raise Forged("nothing was lent under this number")
        lent = self._lent[number]
        return self.answer(message, lambda *args, **kwargs: _LENT[how](lent, *args, **kwargs))

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
        if "x" in answer:
            self.deceived(str(answer["x"]))
        try:
            self.take_changes(crossing, answer.get("w", []))
            if "v" in answer:
                return crossing.unpack(answer["v"])
            error = self.error(answer)
        except MALFORMED as problem:
            raise Forged(str(answer)[:80]) from problem
        raise error

    def deceived(self, kind: str) -> None:
        """A class of the other side's lies about what it is equal to."""

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
            told = {"w": crossing.changes(before), "v": crossing.pack(value)}
        except (NotPlain, *MALFORMED) as refused:  # too long for its memory, or too deep, too
            told = {"p": str(refused)}
        return told if crossing.deceit is None else {**told, "x": crossing.deceit}

    # -------------------------------------------------------------------------------------- errors

    def pack_error(self, error: BaseException) -> dict[str, Any]:
        """An exception as it crosses; what cannot be told of it is left out."""
        return {"e": self.crossing().pack_error(error)}

    def error(self, answer: dict[str, Any]) -> BaseException:
        """The exception of an answer without a value. Raises one of MALFORMED."""
        if "p" in answer:
            return NotPlain(str(answer["p"])[:80])
        return self.crossing().unpack_error(answer["e"])


def _told_changes(crossing: Crossing, before: list[list[Any]]) -> list[Any]:
    try:
        return crossing.changes(before)
    except NotPlain:
        return []


# ------------------------------------------------------------- what is lent, and what stands for it


def _borrowed_iterator(ask: Callable[..., Any]) -> Iterator[Any]:
    while held := ask("next"):
        yield held[0]


async def _borrowed_generator(ask: Callable[..., Any]) -> AsyncIterator[Any]:
    while held := ask("anext"):
        yield held[0]


async def _borrowed_awaitable(ask: Callable[..., Any]) -> Any:
    return ask("await")


def _borrowed_function(ask: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(ask)(functools.partial(ask, "call"))


class _Borrowed:
    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask


class _Iterable(_Borrowed):
    borrowed = "J"

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("iter"))


class _Manager(_Borrowed):
    borrowed = "G"

    def __enter__(self) -> Any:
        return self._ask("enter")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return self._ask("exit", error) is True and _on_purpose(error)


class _AsyncManager(_Borrowed):
    borrowed = "H"

    async def __aenter__(self) -> Any:
        return self._ask("aenter")

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return self._ask("aexit", error) is True and _on_purpose(error)


def _on_purpose(error: BaseException | None) -> bool:
    """Whether the error was raised by a statement `raise`: no context may swallow what an assertion found."""
    if not isinstance(error, Exception) or isinstance(error, AssertionError):
        return False
    import traceback  # here only: it takes long to load

    *_, last = traceback.extract_tb(error.__traceback__)
    return (last.line or "").startswith("raise")


_BORROWED: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "N": _borrowed_iterator, "W": _borrowed_awaitable, "Z": _borrowed_generator, "F": _borrowed_function,
    "J": _Iterable, "G": _Manager, "H": _AsyncManager,
}  # fmt: skip


def _left(lent: Any, error: BaseException | None) -> bool:
    return bool(lent.__exit__(error and type(error), error, error and error.__traceback__))


async def _next(lent: Any) -> list[Any]:
    """The next item, or nothing."""
    async for item in lent:
        return [item]
    return []


async def _awaited(lent: Any) -> Any:
    return await lent


async def _left_later(lent: Any, error: BaseException | None) -> bool:
    return bool(await lent.__aexit__(error and type(error), error, error and error.__traceback__))


@functools.cache
def _loop() -> Any:
    import asyncio

    return asyncio.new_event_loop()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return _loop().run_until_complete(coroutine)


_LENT: dict[str, Callable[..., Any]] = {
    "call": lambda lent, *args, **kwargs: lent(*args, **kwargs),
    "iter": iter,
    "next": lambda lent: [item for _, item in zip((None,), lent, strict=False)],
    "await": lambda lent: _run(_awaited(lent)),
    "anext": lambda lent: _run(_next(lent)),
    "enter": lambda lent: lent.__enter__(),
    "exit": _left,
    "aenter": lambda lent: _run(_awaited(lent.__aenter__())),
    "aexit": lambda lent, error: _run(_left_later(lent, error)),
}
"""how -> what is done with what was lent"""
