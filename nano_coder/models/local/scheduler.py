"""Schedulers: calls of many agents' threads become rows of one engine, which one of these threads steps.

The scheduler has no thread of its own. One of the calling threads is the leader: it steps the engine until
its own row has finished, then another waiting thread takes over. A thread can also declare itself the host;
then only the host steps. A call returns when its row finishes, so an agent's tools run while the rest of the
batch is decoded.
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

from nano_shared.errors import NanoError, PolicyError, UsageError

if TYPE_CHECKING:
    from nano_coder.models.local.sampler import DecodingRow, GenerationRequest, Sampled
from contextlib import AbstractContextManager, nullcontext

from nano_shared.policy import Policy

SchedulerKind = Literal["lockstep", "free"]
StepUntilDone = Callable[["Future[Any]"], None]
"""steps the engine in the calling thread until the future is done"""


class Stepper(Protocol):
    """The methods of an engine that a scheduler calls."""

    def admit(self, requests: Sequence[GenerationRequest]) -> list[DecodingRow]: ...
    def step(self) -> list[DecodingRow]: ...
    def drop(self, rows: Sequence[DecodingRow]) -> None: ...
    def release(self, owner: int) -> None: ...
    def free(self) -> None: ...


class AgentSlot:
    """One agent's place at the scheduler: entered by the agent's thread, freed when the thread leaves it."""

    def __init__(self, scheduler: Scheduler, index: int) -> None:
        self._scheduler = scheduler
        self.index = index

    def __enter__(self) -> AgentSlot:
        self._scheduler.bind(self.index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduler.bind(None)
        self.leave()

    def leave(self) -> None:
        """Free the slot, from any thread; needed only for a slot that no thread entered."""
        self._scheduler.leave(self.index)


class ScheduledCall:
    """A request and, once its row has finished, its answer."""

    def __init__(self, request: GenerationRequest, slot: int | None) -> None:
        self.request = request
        self.slot = slot
        self.answer: Sampled | None = None
        self.error: NanoError | None = None
        self.seconds = 0.0
        """its share of the engine's time: the duration of each step, divided by the rows in it"""
        self.wake = threading.Event()
        """set when the call is done, or when its thread shall become the leader"""

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class Scheduler:
    """The free scheduler: a request joins the batch at the next step. Thread-safe."""

    def __init__(self, engine: Stepper, name: str) -> None:
        """`name` names the engine's weights in error messages."""
        self._engine = engine
        self._name = name
        self._lock = threading.Lock()
        self._leader: ScheduledCall | threading.Event | None = None
        """the leader's call, or the host's event; None while nobody steps"""
        self._host: threading.Event | None = None
        """set when there is work for the host; None without a host"""
        self._waiting: list[ScheduledCall] = []
        """calls that have not joined the batch, in order of arrival"""
        self._live: dict[DecodingRow, ScheduledCall] = {}
        self._slots: set[int] = set()
        self._at_once: int | None = None
        self._departed: list[int] = []
        """owners that left: their retained KV can be released"""
        self._abandoned: list[DecodingRow] = []
        self._thread = threading.local()

    def slot(self, index: int) -> AgentSlot:
        """Take the slot of this agent. Raises UsageError if it is taken."""
        with self._lock:
            if index in self._slots:
                raise UsageError(f"agent {index} has a slot already; taken: {sorted(self._slots)}")
            self._slots.add(index)
        return AgentSlot(self, index)

    def slots(self, count: int, at_once: int) -> list[AgentSlot]:
        """Slots for `count` agents that start in this order, `at_once` of them at a time."""
        taken = [self.slot(index) for index in range(count)]
        with self._lock:
            self._at_once = at_once
        return taken

    def bind(self, index: int | None) -> None:
        """Make this the slot of the current thread; None: the thread has no slot."""
        self._thread.index = index

    @property
    def bound(self) -> int | None:
        """The slot of the current thread."""
        index: int | None = getattr(self._thread, "index", None)
        return index

    def leave(self, index: int) -> None:
        """Free a slot; a round that waited for it can start. The last agent to leave frees the engine's
        memory."""
        with self._lock:
            self._slots.discard(index)
            self._waiting = [call for call in self._waiting if call.slot != index]
            self._departed.append(index)
            if not self._slots:
                self._at_once = None
            if self._slots or self._leader or self._live or self._waiting:
                self._wake_leader()
            else:
                self._departed.clear()
                self._engine.free()

    def release(self, owner: int) -> None:
        """Let the KV go that is retained for this owner."""
        with self._lock:
            self._departed.append(owner)

    def rest(self) -> None:
        """Free the engine's memory if no call waits or is answered."""
        with self._lock:
            if not (self._leader or self._live or self._waiting):
                self._engine.free()

    def call(self, request: GenerationRequest) -> Sampled:
        """Queue the request and wait for its answer. Raises PolicyError if the engine failed on its batch."""
        slot = self.bound
        if slot is not None or request.owner is None:
            request = replace(request, owner=slot if slot is not None else -threading.get_ident())
        call = ScheduledCall(request, slot)
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
            # many threads get this error: each raises a copy, since raising adds a traceback to the object
            raise type(call.error)(*call.error.args) from call.error
        assert call.answer is not None
        return call.answer

    @contextmanager
    def hosted(self) -> Iterator[StepUntilDone]:
        """Make this thread the host. Yields a function that steps the engine until a future is done.

        While there is a host, no other thread steps. Reason: OpenMP keeps its workers awake for the thread
        that trains only; small matrix products take twice as long in any other. A call of `call` by the host
        itself would never return. There can be one host at a time.
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
                if self._leader is host:  # interrupted in the middle of a step
                    self._leader = None
                    self._fail(PolicyError("the thread that served this batch was interrupted; run it again"))

    def _joinable(self) -> list[ScheduledCall]:
        """The waiting calls that may join the batch now, in the order in which they join. Needs the lock."""
        return self._waiting

    def _ready(self) -> bool:
        return bool(self._live or self._joinable())

    def _take_lead(self, call: ScheduledCall) -> bool:
        """Make this call's thread the leader, if there is neither leader nor host and there is work."""
        if self._host is not None or self._leader is not None or not self._ready():
            return False
        self._leader = call
        return True

    def _wake_leader(self) -> None:
        """Wake the host, or, without a leader, a thread that can lead, if there is work."""
        if self._host is not None:
            self._host.set()
        elif self._leader is None and self._ready():
            call = next(iter(self._live.values()), None) or self._joinable()[0]
            call.wake.set()

    def _lead(self, mine: ScheduledCall) -> None:
        """Step the engine until this thread's row has finished, or there is no work."""
        try:
            while self._leader is mine:
                self._advance()
                with self._lock:
                    if mine.done or not self._ready():
                        self._leader = None
                        self._wake_leader()
        finally:
            with self._lock:
                if self._leader is mine:  # this thread was interrupted; the others must not wait for ever
                    self._leader = None
                    self._fail(
                        PolicyError("the thread that served this batch was interrupted; run it again"),
                        but=mine,
                    )
                    self._wake_leader()

    def _advance(self) -> None:
        """One step of the engine: let calls join, step, and answer the calls whose row has finished."""
        with self._lock:
            joining = list(self._joinable())
            self._waiting = [call for call in self._waiting if call not in joining]
            # only when calls join: at that point the order of releases, and so evictions, is reproducible
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

    def _fail(
        self, error: NanoError, joining: Sequence[ScheduledCall] = (), but: ScheduledCall | None = None
    ) -> None:
        """Answer all calls of the batch with an error, and empty the engine."""
        for call in {*self._live.values(), *joining} - {but}:
            call.error = error
            call.wake.set()
        self._live.clear()
        self._engine.free()

    def _abandon(self, call: ScheduledCall) -> None:
        """Drop a call whose thread no longer waits for it."""
        with self._lock:
            self._waiting = [other for other in self._waiting if other is not call]
            for row in [row for row, other in self._live.items() if other is call]:
                del self._live[row]
                self._abandoned.append(row)
            self._wake_leader()


class Lockstep(Scheduler):
    """The lockstep scheduler: rounds of one request of each agent, in the order of their slots. Thread-safe.

    A round starts when the previous one is decoded and every agent either waits for a completion or has left.
    An agent gets its answer when its row finishes, and runs its tools at once; its next request waits for the
    next round. With more slots than run at once, a round has those of the lowest indices; when an agent
    leaves, the next one takes part.

    Threads without a slot are served between rounds, each alone.
    """

    def _joinable(self) -> list[ScheduledCall]:
        if self._live:
            return []
        for call in self._waiting:
            if call.slot is None:
                return [call]
        running = sorted(self._slots)[: self._at_once]
        calls = {call.slot: call for call in self._waiting}
        if any(slot not in calls for slot in running):
            return []
        return [calls[slot] for slot in running]


def slots_for(policy: Policy, count: int, at_once: int) -> list[AbstractContextManager[object]]:
    """[count] slots, one for each agent; null contexts for policies without a scheduler."""
    agents = getattr(policy, "agents", None)
    return list(agents(count, at_once)) if agents else [nullcontext() for _ in range(count)]


def cancel_pending(futures: Sequence[Future[Any]], slots: Sequence[AbstractContextManager[object]]) -> None:
    """Cancel agents that have not started, and free their slots."""
    for future, slot in zip(futures, slots, strict=True):
        if future.cancel():
            with slot:
                pass
