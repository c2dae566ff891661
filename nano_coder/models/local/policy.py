"""The local policy: completes with weights in this process; completions carry exact token ids and log-probs.

Calls of many agents' threads become rows of one engine. The scheduler has no thread of its own: one of the
waiting threads is the leader, which steps the engine until its own row has finished, then another one takes
over. A thread can also declare itself the host; then only the host steps. A call returns when its row
finishes, so an agent's tools run while the rest of the batch is decoded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from nano_coder.agent.chat_template import ChatTemplate
from nano_coder.models.repetition import Repetition
from nano_shared.errors import ContextFull, NanoError, PolicyError, UsageError
from nano_shared.policy import Beginning, Conversation, Likeliest
from nano_shared.types import Completion, Finish, Sampling, TurnTokens

if TYPE_CHECKING:
    from nano_coder.models.local.engine import Engine, TokenScore
    from nano_coder.models.local.sampler import DecodingRow, GenerationRequest, Grammars, OnToken, Sampled

SchedulerKind = Literal["lockstep", "free"]
StepUntilDone = Callable[["Future[Any]"], None]
"""steps the engine in the calling thread until the future is done"""
_ALTERNATIVES = 6
"""likeliest tokens of a position that are kept"""
_INTERRUPTED = "the thread that served this batch was interrupted; run it again"


class LocalPolicy:
    """A Policy over an Engine. Thread-safe.

    Threads that hold a slot (`agent`) are batched together. Under the lockstep scheduler the composition of a
    batch depends on the agents' tokens and never on the clock, so seeds reproduce a rollout bit for bit;
    under the free one a request joins the batch at the next step. Up to rounding, rows get the same tokens
    from both.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        *,
        id: str,
        version: int = 0,
        scheduler: SchedulerKind | None = None,
    ) -> None:
        """`scheduler` None: free on a GPU, whose results no seed reproduces bit for bit, else lockstep."""
        self.engine = engine
        self.template = template
        self.id = id
        self.version = version
        self._scoring = threading.Lock()
        kind = scheduler or ("lockstep" if engine.device.type == "cpu" else "free")
        self._scheduler = Lockstep(engine, id) if kind == "lockstep" else Scheduler(engine, id)

    @property
    def context_limit(self) -> int:
        return self.engine.context_limit

    @property
    def agents_together(self) -> int:
        """Agents that keep the rows of the engine busy: as many, on a GPU twice, since some run tools."""
        return self.engine.max_batch * (1 if self.engine.device.type == "cpu" else 2)

    @property
    def vocab_size(self) -> int:
        config: Any = self.engine.model.config
        return int(config.get_text_config().vocab_size)

    @property
    def template_hash(self) -> str:
        return self.template.template_hash

    def agent(self, index: int) -> AgentSlot:
        """A slot, taken by this call and bound to the thread that enters it: `with policy.agent(0): ...`.

        Take the slots of all agents before starting their threads: a round waits for every slot that is
        taken. Raises UsageError if the index is taken.
        """
        return self._scheduler.slot(index)

    def hosted(self) -> AbstractContextManager[StepUntilDone]:
        """Make the calling thread the only one that steps the engine; see `Scheduler.hosted`."""
        return self._scheduler.hosted()

    def agents(self, count: int, at_once: int) -> list[AgentSlot]:
        """Slots for `count` agents that start in this order, `at_once` of them at a time."""
        return self._scheduler.slots(count, at_once)

    def complete(
        self,
        conversation: Conversation,
        sampling: Sampling,
        *,
        owner: int | None = None,
        on_token: OnToken | None = None,
        top_logprobs: int = 0,
        beginning: Beginning = (),
    ) -> Completion:
        """Sample the next turn, which starts with `beginning`. Does not modify the conversation, whose `stop`
        is asked at each layer of a prefill, and at each token unless `on_token` is given.

        `owner` is the conversation for which KV is kept where the thread holds no slot; `on_token` gets each
        token as it is sampled, with the `top_logprobs` likeliest of its place, and ends the turn by returning
        False. Raises ContextFull before sampling if no token would fit, PolicyError if template or engine
        fails, UsageError for a grammar that cannot be compiled.
        """
        self.refuse_long([m.content for m in conversation.messages[conversation.rendered :]])
        number, delta = self.template.next_row(conversation)
        row = (*conversation.tokens, *delta) if number == conversation.row else delta
        if beginning:
            sampling = sampling.model_copy(update={"given": len(beginning)})
        if on_token is None and (stop := conversation.stop) is not None:
            on_token = partial(_unless, stop)
        began = time.monotonic()
        repetition = Repetition() if conversation.ends_repetition else None
        ending = conversation.stop, repetition
        sampled = self._generate(row, sampling, owner, on_token, top_logprobs, ending, beginning)
        conversation.waited += time.monotonic() - began - sampled.seconds
        return self._completion(sampled, number, delta, sampling)

    def complete_beginning(
        self, conversation: Conversation, sampling: Sampling, beginning: Beginning
    ) -> tuple[Completion, list[Likeliest]]:
        """The next turn, which begins with these tokens, and the likeliest tokens of each position behind
        them. Raises as `complete`."""
        found, stop = list[Likeliest](), conversation.stop

        def keep(_token: int, _logprob: float, likeliest: Likeliest) -> bool:
            found.append(likeliest)
            return stop is None or not stop.is_set()

        completion = self.complete(
            conversation, sampling, on_token=keep, top_logprobs=_ALTERNATIVES, beginning=beginning
        )
        return completion, found

    def complete_ids(
        self, ids: tuple[int, ...], sampling: Sampling, *, on_token: OnToken | None = None,
        top_logprobs: int = 0,
    ) -> Completion:  # fmt: skip
        """Sample a continuation of these ids; no template is applied. Raises as `complete`."""
        sampled = self._generate(ids, sampling, None, on_token, top_logprobs)
        return self._completion(sampled, 0, ids, sampling)

    def score(self, ids: Sequence[int], top: int) -> list[TokenScore]:
        """Log-probs of `ids[1:]`, with the `top` likeliest tokens of each place. Raises ContextFull."""
        if len(ids) > self.context_limit:
            raise ContextFull(
                f"{len(ids)} tokens are more than the {self.context_limit} that {self.id} reads"
            )
        with self._scoring:  # one at a time: the logits of a chunk take hundreds of MB
            return self.engine.score_tokens(ids, top=top)

    @cached_property
    def _grammars(self) -> Grammars:
        from nano_coder.models.local.sampler import Grammars

        return Grammars(self.template.encoder.serialised, sorted(self.engine.eos_ids), self.vocab_size)

    def _generate(
        self, row: tuple[int, ...], sampling: Sampling, owner: int | None, on_token: OnToken | None, top: int,
        ending: tuple[threading.Event | None, Repetition | None] = (None, None), beginning: Beginning = (),
    ) -> Sampled:  # fmt: skip
        from nano_coder.models.local.sampler import GenerationRequest, Sampled

        if beginning:
            given, logprobs = zip(*beginning, strict=True)
            after = Sampled((), (), Finish.STOP)
            if given[-1] not in self.engine.eos_ids:
                after = self._generate((*row, *given), sampling, owner, on_token, top, ending)
            return replace(after, ids=(*given, *after.ids), logprobs=(*logprobs, *after.logprobs))
        fitting = self.fitting(row, sampling)
        constraint = self._grammars.constraint(sampling.grammar) if sampling.grammar is not None else None
        stop, repetition = ending
        request = GenerationRequest(
            row, fitting, sampling.seed, owner, on_token, constraint, top, repetition, stop
        )
        sampled = self._scheduler.call(request)
        if constraint is not None:
            constraint.check()
        return sampled

    def fitting(self, row: Sequence[int], sampling: Sampling) -> Sampling:
        """The sampling of what may follow a row. Raises ContextFull if no token would fit."""
        room = self.context_limit - len(row)
        if room < 1:
            raise ContextFull(
                f"the row has {len(row)} tokens with the new messages, of the {self.context_limit} that"
                f" {self.id} reads ({self.engine.limited_by}); shorten the task or end the run"
            )
        return sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})

    def _completion(
        self, sampled: Sampled, number: int, delta: tuple[int, ...], sampling: Sampling
    ) -> Completion:
        ends = not self.engine.eos_ids.isdisjoint(sampled.ids[-1:])
        ids = sampled.ids[:-1] if ends else sampled.ids
        tokens = TurnTokens(row=number, context_ids=delta, sampled_ids=sampled.ids, logprobs=sampled.logprobs)
        return Completion(
            text=self.decode(ids), finish=sampled.finish, tokens=tokens, sampling=sampling, policy_id=self.id,
            policy_version=self.version,
        )  # fmt: skip

    @contextmanager
    def using_slot(self, slot: int | None) -> Iterator[None]:
        """The calling thread uses this slot, which another thread holds; None: no slot."""
        before = self._scheduler.bound
        self._scheduler.bind(slot)
        try:
            yield
        finally:
            self._scheduler.bind(before)

    @property
    def slot(self) -> int | None:
        return self._scheduler.bound

    def rest(self) -> None:
        self._scheduler.rest()

    def release(self, owner: int) -> None:
        self._scheduler.release(owner)

    def check_grammar(self, grammar: str) -> None:
        """Raises UsageError for a grammar that cannot be compiled or that no token can begin, and ConfigError
        without llguidance."""
        constraint = self._grammars.constraint(grammar)
        constraint.allowed(self.vocab_size)
        try:
            constraint.check()
        except PolicyError as problem:
            raise UsageError(str(problem)) from None

    def refuse_long(self, texts: Sequence[str], most: int | None = None) -> None:
        """Raises ContextFull for texts of more than `most` tokens (None: the context), before they are
        rendered and encoded; not for each that is too long."""
        most = most or self.context_limit
        if self.template.encoder.surely_more(texts, most):
            size = sum(map(len, texts))
            raise ContextFull(
                f"{size} characters are more than the {most} tokens that {self.id} reads; shorten the task or"
                " end the run"
            )

    def count(self, text: str) -> int:
        return self.template.count(text)

    def next_row(self, conversation: Conversation) -> tuple[int, tuple[int, ...]]:
        """The row of the next turn, and the ids that the template appends before it is sampled."""
        return self.template.next_row(conversation)

    def decode(self, ids: Sequence[int]) -> str:
        return self.template.encoder.decode(ids)


class AgentSlot:
    """One agent's place at the scheduler: entered by the agent's thread, freed when the thread leaves it."""

    def __init__(self, scheduler: Scheduler, index: int) -> None:
        self._scheduler, self.index = scheduler, index

    def __enter__(self) -> AgentSlot:
        self._scheduler.bind(self.index)
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.bind(None)
        self.leave()

    def leave(self) -> None:
        """Free the slot, from any thread; needed only for a slot that no thread entered."""
        self._scheduler.leave(self.index)


class ScheduledCall:
    """A request and, once its row has finished, its answer."""

    def __init__(self, request: GenerationRequest, slot: int | None) -> None:
        self.request, self.slot = request, slot
        self.answer: Sampled | None = None
        self.error: NanoError | None = None
        self.seconds = 0.0
        """its share of the engine's time: the duration of each step, divided by the rows in it"""
        self.wake = threading.Event()
        """set when the call is done, or when its thread shall become the leader"""

    @property
    def done(self) -> bool:
        return self.answer is not None or self.error is not None


class _Host:
    """A thread that steps the engine for all others until a future is done."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self.until: Future[Any] = Future()

    @property
    def done(self) -> bool:
        return self.until.done()


class Scheduler:
    """The free scheduler: a request joins the batch at the next step. Thread-safe."""

    def __init__(self, engine: Engine, name: str) -> None:
        """`name` names the engine's weights in error messages."""
        self._engine = engine
        self._name = name
        self._lock = threading.Lock()
        self._leader: ScheduledCall | _Host | None = None
        """None while nobody steps"""
        self._host: _Host | None = None
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
        with self._lock:
            self._departed.append(owner)

    def rest(self) -> None:
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
            self._serve(call)
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
        host = self._host = _Host()

        def lead(until: Future[Any]) -> None:
            host.until = until
            until.add_done_callback(lambda _: host.wake.set())
            self._serve(host)

        try:
            yield lead
        finally:
            with self._lock:
                self._host = None
                self._wake_leader()

    def _serve(self, waiter: ScheduledCall | _Host) -> None:
        """Wait until the waiter is done; meanwhile its thread steps the engine where it may lead."""
        while not waiter.done:
            with self._lock:
                leads = self._leader is None and self._host in (None, waiter) and self._ready()
                if leads:
                    self._leader = waiter
                else:
                    self._wake_leader()
            if leads:
                self._lead(waiter)
            else:
                waiter.wake.wait()
                waiter.wake.clear()

    def _lead(self, waiter: ScheduledCall | _Host) -> None:
        """Step the engine until the waiter is done, or there is no work."""
        interrupted, leads = True, True
        try:
            while leads:
                self._advance()
                with self._lock:
                    leads = not waiter.done and self._ready()
            interrupted = False
        finally:
            with self._lock:
                if interrupted:  # the others must not wait for ever
                    self._fail(PolicyError(_INTERRUPTED), but=waiter)
                self._leader = None
                self._wake_leader()

    def _joinable(self) -> list[ScheduledCall]:
        """The waiting calls that may join the batch now, in the order in which they join. Needs the lock."""
        return self._waiting

    def _ready(self) -> bool:
        return bool(self._live or self._joinable())

    def _wake_leader(self) -> None:
        """Where nobody leads and there is work, wake the host, else a thread that waits for an answer."""
        if self._leader is None and self._ready():
            (self._host or next(iter(self._live.values()), None) or self._joinable()[0]).wake.set()

    def _advance(self) -> None:
        """One step of the engine: let calls join, step, and answer the calls whose row has finished."""
        with self._lock:
            joining = list(self._joinable())
            self._waiting = [call for call in self._waiting if call not in joining]
            # only when calls join: at that point the order of releases, and so evictions, is reproducible
            departed = sorted(self._departed) if joining else []
            self._departed = [] if joining else self._departed
            abandoned, self._abandoned = self._abandoned, []
        rows_asked = [call.request for call in (*self._live.values(), *joining)]
        try:
            self._engine.drop(abandoned)
            for owner in departed:
                self._engine.release(owner)
            rows = self._engine.add_requests([call.request for call in joining])
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
                        f"the engine of {self._name} failed on a batch of {len(rows_asked)} rows, the longest"
                        f" of {max(len(r.ids) for r in rows_asked)} tokens: {error}"
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

    def _fail(self, error: NanoError, joining: Sequence[ScheduledCall] = (), but: object = None) -> None:
        """Answer all calls of the batch with an error, and empty the engine."""
        for call in {*self._live.values(), *joining} - {but}:
            call.error = error
            call.wake.set()
        self._live.clear()
        self._engine.free()

    def _abandon(self, call: ScheduledCall) -> None:
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


def _unless(stop: threading.Event, *_token: object) -> bool:
    return not stop.is_set()
