"""Lockstep: calls of many threads become batches that depend on who calls, never on when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

from nano_shared import NanoError, PolicyError, UsageError

Q = TypeVar("Q")
A = TypeVar("A")


class Seat:
    """One agent's place in the lockstep: entered by the agent's thread, given up when it leaves."""

    def __init__(self, lockstep: Lockstep[Q, A], index: int) -> None:
        self._lockstep = lockstep
        self.index = index

    def __enter__(self) -> Seat:
        self._lockstep.bind(self.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lockstep.bind(None)
        self.leave()

    def leave(self) -> None:
        """Give the seat up, from any thread; needed only for a seat that no thread ever entered."""
        self._lockstep.leave(self.index)


class _Call(Generic[Q, A]):
    """A question on its way to its answer."""

    def __init__(self, question: Q) -> None:
        self.question = question
        self.answer: A | None = None
        self.error: NanoError | None = None
        self.done = False


class Lockstep(Generic[Q, A]):
    """Runs `serve` on the questions of all seats at once, in the order of their indices.

    The thread whose call or departure completes the round serves it. Calls of threads without a seat are
    served at once and alone; `serve` must lock what it shares.
    """

    def __init__(self, serve: Callable[[list[Q]], list[A]], *, max_batch: int | None = None) -> None:
        """`max_batch` splits a round into consecutive batches."""
        self._serve = serve
        self._max_batch = max_batch
        self._seats: set[int] = set()
        self._waiting: dict[int, _Call[Q, A]] = {}
        self._changed = threading.Condition()
        self._thread = threading.local()

    def seat(self, index: int) -> Seat:
        """Take a seat. Raises UsageError if it is taken."""
        with self._changed:
            if index in self._seats:
                raise UsageError(f"agent {index} has a seat already; seated: {sorted(self._seats)}")
            self._seats.add(index)
        return Seat(self, index)

    def bind(self, index: int | None) -> None:
        """Seat the current thread, or unseat it."""
        self._thread.index = index

    def leave(self, index: int) -> None:
        """Free a seat; whoever waited for it goes on."""
        with self._changed:
            self._seats.discard(index)
            self._waiting.pop(index, None)
            self._changed.notify_all()

    def call(self, question: Q) -> A:
        """The answer to this question. Raises what `serve` raised for its batch."""
        index: int | None = getattr(self._thread, "index", None)
        if index is None:
            return self._serve([question])[0]
        call: _Call[Q, A] = _Call(question)
        with self._changed:
            self._waiting[index] = call
            self._changed.notify_all()
            self._changed.wait_for(lambda: call.done or self._complete)
            batch = [] if call.done else self._take_round()
        if batch:
            self._answer(batch)
        if call.error is not None:
            # one error answers many threads, and a raised one collects their tracebacks
            raise type(call.error)(*call.error.args) from call.error
        assert call.answer is not None
        return call.answer

    @property
    def _complete(self) -> bool:
        return self._waiting.keys() == self._seats

    def _take_round(self) -> list[_Call[Q, A]]:
        batch = [self._waiting[index] for index in sorted(self._waiting)]
        self._waiting.clear()
        return batch

    def _answer(self, calls: list[_Call[Q, A]]) -> None:
        size = self._max_batch or len(calls)
        try:
            for start in range(0, len(calls), size):
                self._answer_batch(calls[start : start + size])
        finally:
            with self._changed:
                for call in calls:
                    if call.answer is None and call.error is None:
                        # the serving thread is being torn down; nobody else may wait for ever
                        call.error = PolicyError(
                            "the thread that served this batch was interrupted; run it again"
                        )
                    call.done = True
                self._changed.notify_all()

    def _answer_batch(self, calls: list[_Call[Q, A]]) -> None:
        try:
            answers = self._serve([call.question for call in calls])
        except NanoError as error:
            for call in calls:
                call.error = error
        else:
            for call, answer in zip(calls, answers, strict=True):
                call.answer = answer
