"""The scheduler: calls of many threads become rows of one engine, stepped by whichever thread waits.

There is no thread of its own. One of the callers leads: it steps the engine until its own row has ended, then
hands over to another; where a thread is the host, it alone leads. An answer goes out when its row ends, so
that the agent's tools run while the rest of the batch is decoded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from nano_shared import NanoError, PolicyError, UsageError

if TYPE_CHECKING:
    from nano_coder.models.local.decoding.row import Request, Row, Sampled

Schedule = Literal["lockstep", "free"]
Lead = Callable[["Future[Any]"], None]
"""steps the engine until the future is done"""


class Stepper(Protocol):
    """What the scheduler asks of an engine."""

    def admit(self, requests: Sequence[Request]) -> list[Row]: ...
    def step(self) -> list[Row]: ...
    def drop(self, rows: Sequence[Row]) -> None: ...
    def release(self, owner: int) -> None: ...
    def free(self) -> None: ...


class Seat:
    """One agent's place: entered by the agent's thread, given up when it leaves."""

    def __init__(self, scheduler: Scheduler, index: int) -> None:
        self._scheduler = scheduler
        self.index = index

    def __enter__(self) -> Seat:
        self._scheduler.bind(self.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduler.bind(None)
        self.leave()

    def leave(self) -> None:
        """Give the seat up, from any thread; needed only for a seat that no thread ever entered."""
        self._scheduler.leave(self.index)


class Call:
    """A request on its way to its answer."""

    def __init__(self, request: Request, seat: int | None) -> None:
        self.request = request
        self.seat = seat
        self.answer: Sampled | None = None
        self.error: NanoError | None = None
        self.seconds = 0.0
        """of the engine's time: of each step, its share among the rows of the batch"""
        self.wake = threading.Event()
        """set when the call is done, or when its thread is to lead"""

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class Scheduler:
    """The free one: a request joins the batch at the next step. Thread-safe."""

    def __init__(self, engine: Stepper, name: str) -> None:
        """`name` is what messages call the engine's weights."""
        self._engine = engine
        self._name = name
        self._lock = threading.Lock()
        self._leader: Call | threading.Event | None = None
        """a call of that thread, or the host"""
        self._host: threading.Event | None = None
        """set when the host has something to do"""
        self._waiting: list[Call] = []
        """in the order of their arrival"""
        self._live: dict[Row, Call] = {}
        self._seats: set[int] = set()
        self._at_once: int | None = None
        self._departed: list[int] = []
        """owners whose KV nobody will ask for"""
        self._abandoned: list[Row] = []
        self._thread = threading.local()

    def seat(self, index: int) -> Seat:
        """Take a seat. Raises UsageError if it is taken."""
        with self._lock:
            if index in self._seats:
                raise UsageError(f"agent {index} has a seat already; seated: {sorted(self._seats)}")
            self._seats.add(index)
        return Seat(self, index)

    def seats(self, count: int, at_once: int) -> list[Seat]:
        """Seats for that many agents, which begin in their order, `at_once` of them at a time."""
        taken = [self.seat(index) for index in range(count)]
        with self._lock:
            self._at_once = at_once
        return taken

    def bind(self, index: int | None) -> None:
        """Seat the current thread, or unseat it."""
        self._thread.index = index

    def leave(self, index: int) -> None:
        """Free a seat; whoever waited for it goes on. The last to leave gives the engine's memory back."""
        with self._lock:
            self._seats.discard(index)
            self._waiting = [call for call in self._waiting if call.seat != index]
            self._departed.append(index)
            if not self._seats:
                self._at_once = None
            if self._seats or self._leader or self._live or self._waiting:
                self._wake_leader()
            else:
                self._departed.clear()
                self._engine.free()

    def call(self, request: Request) -> Sampled:
        """The answer to this request. Raises PolicyError if the engine failed on its batch."""
        seat: int | None = getattr(self._thread, "index", None)
        owner = seat if seat is not None else -threading.get_ident()
        call = Call(replace(request, owner=owner), seat)
        try:
            with self._lock:
                self._waiting.append(call)
                leading = self._take_lead(call)
                if not leading:
                    self._wake_leader()
            while not call.done:
                if leading:
                    self._lead(call)
                else:
                    call.wake.wait()
                    call.wake.clear()
                with self._lock:
                    leading = not call.done and self._take_lead(call)
        finally:
            if not call.done:
                self._abandon(call)
        if call.error is not None:
            # one error answers many threads, and a raised one collects their tracebacks
            raise type(call.error)(*call.error.args) from call.error
        assert call.answer is not None
        return call.answer

    @contextmanager
    def hosted(self) -> Iterator[Lead]:
        """Make this thread the host: it alone steps the engine, whenever it waits for a future as given here.

        A second thread that computes finds OpenMP's workers asleep: small matrix products take twice as long
        there as in the thread that trains. Calls of the host itself would wait for ever; one host at a time.
        """
        with self._lock:
            self._host = threading.Event()
        try:
            yield self._lead_until
        finally:
            with self._lock:
                self._host = None
                self._wake_leader()

    def _lead_until(self, ended: Future[Any]) -> None:
        host = self._host
        assert host is not None
        ended.add_done_callback(lambda _: host.set())
        try:
            while not ended.done():
                with self._lock:
                    ready = self._leader in (None, host) and self._ready()
                    if ready:
                        self._leader = host
                if ready:
                    self._advance()
                    with self._lock:
                        self._leader = None
                else:
                    host.wait()
                    host.clear()
        finally:
            with self._lock:
                if self._leader is host:  # torn down in the middle of a step
                    self._leader = None
                    self._fail(PolicyError("the thread that served this batch was interrupted; run it again"))

    def _joinable(self) -> list[Call]:
        """The waiting calls that may join the batch now, in the order in which they do. Under the lock."""
        return self._waiting

    def _ready(self) -> bool:
        return bool(self._live or self._joinable())

    def _take_lead(self, call: Call) -> bool:
        """Make this call's thread the leader, if there is none and there is something to do."""
        if self._host is not None or self._leader is not None or not self._ready():
            return False
        self._leader = call
        return True

    def _wake_leader(self) -> None:
        """Wake the host, or a thread that can lead if none does and there is something to do."""
        if self._host is not None:
            self._host.set()
        elif self._leader is None and self._ready():
            call = next(iter(self._live.values()), None) or self._joinable()[0]
            call.wake.set()

    def _lead(self, mine: Call) -> None:
        """Step the engine until my row has ended, or there is nothing to do."""
        try:
            while self._leader is mine:
                self._advance()
                with self._lock:
                    if mine.done or not self._ready():
                        self._leader = None
                        self._wake_leader()
        finally:
            with self._lock:
                if self._leader is mine:  # this thread is being torn down; nobody else may wait for ever
                    self._leader = None
                    self._fail(
                        PolicyError("the thread that served this batch was interrupted; run it again"),
                        but=mine,
                    )
                    self._wake_leader()

    def _advance(self) -> None:
        """One step of the engine: calls join it, and those whose row has ended are answered."""
        with self._lock:
            joining = list(self._joinable())
            self._waiting = [call for call in self._waiting if call not in joining]
            # at a time that does not depend on the clock, since what is kept decides what is evicted
            departed = sorted(self._departed) if joining else []
            self._departed = [] if joining else self._departed
            abandoned, self._abandoned = self._abandoned, []
        requests = [call.request for call in (*self._live.values(), *joining)]
        try:
            self._engine.drop(abandoned)
            for owner in departed:
                self._engine.release(owner)
            rows = self._engine.admit([call.request for call in joining])
            with self._lock:
                self._live.update(zip(rows, joining, strict=True))
            began = time.monotonic()
            finished = self._engine.step()
        except NanoError as error:
            with self._lock:
                self._fail(error, joining)
        except (RuntimeError, ValueError, IndexError, TypeError, MemoryError) as error:
            with self._lock:
                self._fail(
                    PolicyError(
                        f"the engine of {self._name} failed on a batch of {len(requests)} rows, the longest"
                        f" of {max(len(r.ids) for r in requests)} tokens: {error}"
                    ),
                    joining,
                )
        else:
            with self._lock:
                share = (time.monotonic() - began) / max(1, len(self._live))
                for call in self._live.values():
                    call.seconds += share
                for row in finished:
                    if row in self._live:
                        call = self._live.pop(row)
                        call.answer = replace(row.sampled(), seconds=call.seconds)
                        call.wake.set()

    def _fail(self, error: NanoError, joining: Sequence[Call] = (), but: Call | None = None) -> None:
        """Answer all calls of the batch with an error, and begin anew with an empty engine."""
        for call in {*self._live.values(), *joining} - {but}:
            call.error = error
            call.wake.set()
        self._live.clear()
        self._engine.free()

    def _abandon(self, call: Call) -> None:
        """Its thread no longer waits for it."""
        with self._lock:
            self._waiting = [other for other in self._waiting if other is not call]
            for row in [row for row, other in self._live.items() if other is call]:
                del self._live[row]
                self._abandoned.append(row)
            self._wake_leader()
