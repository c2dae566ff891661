"""Generation: requests are sampled in threads, whole or as a stream, and bounded and measured."""

from __future__ import annotations

import asyncio
import heapq
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from nano_apis.api import error_shape
from nano_apis.conversations import ClientSession, Conversations
from nano_apis.request import (
    AnswerWriter,
    Event,
    ModelAnswer,
    ModelRequest,
    OnText,
    TextDelta,
)
from nano_apis.served_models import ServedModel
from nano_coder.models.endpoint.model_card import RUN_HEADER
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.access import BadRequest
from nano_shared.errors import NanoError
from nano_shared.types import Finish

_T = TypeVar("_T")
_SESSION_HEADER = "x-session-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    concurrent: int = 64
    """requests that are answered at a time; more wait"""
    waiting: int = 256
    """requests that may wait; further ones get 429"""
    idle_seconds: float = 600.0
    """after which a conversation's run is ended"""


class ClientGone(Exception):
    """The client went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Who asks, in which session, and since when."""

    session: ClientSession
    agent: str
    """its user agent"""
    received: float
    """unix seconds"""
    connected: threading.Event
    """cleared when the client goes away"""

    @classmethod
    def of(cls, request: Request) -> Client:
        connected = threading.Event()
        connected.set()
        headers = request.headers
        name = str(request.path_params.get("session") or headers.get(_SESSION_HEADER, ""))[:200]
        session = ClientSession(name, request.state.owner, headers.get(RUN_HEADER, "")[:200])
        agent = headers.get("user-agent", "")[:200]
        return cls(session=session, agent=agent, received=time.time(), connected=connected)


class ServerMetrics:
    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.running = self._new(Gauge, "num_requests_running", "Requests that are being answered.")
        self.waiting = self._new(Gauge, "num_requests_waiting", "Requests that wait for a place.")
        self.kv_usage = self._new(Gauge, "kv_cache_usage_perc", "Share of the KV budget in use; 1 is full.")
        self.prompt = self._new(Counter, "prompt_tokens", "Tokens of prompts.")
        self.sampled = self._new(Counter, "generation_tokens", "Sampled tokens.")
        self.queries = self._new(Counter, "prefix_cache_queries", "Prompt tokens looked up in the KV cache.")
        self.hits = self._new(Counter, "prefix_cache_hits", "Prompt tokens whose KV was cached.")
        self.success = self._new(Counter, "request_success", "Answered requests.", "finished_reason")
        self.first = self._new(Histogram, "time_to_first_token_seconds", "From a request to its first token.")
        self.between = self._new(Histogram, "inter_token_latency_seconds", "Between two tokens of an answer.")
        self.whole = self._new(Histogram, "e2e_request_latency_seconds", "From a request to its end.")
        self._counted: WeakKeyDictionary[LocalPolicy, tuple[int, int]] = WeakKeyDictionary()
        shown = self.prompt, self.sampled, self.queries, self.hits, self.first, self.between, self.whole
        for metric in (self.running, self.waiting, *shown):
            metric.labels(model)
        self.running, self.waiting = self.running.labels(model), self.waiting.labels(model)

    def _new(self, kind: Any, name: str, help: str, *labels: str) -> Any:
        return kind(f"vllm:{name}", help, ["model_name", *labels], registry=self.registry)

    def answered(self, model: str, answer: ModelAnswer, seconds: float) -> None:
        self.prompt.labels(model).inc(answer.prompt_tokens)
        self.sampled.labels(model).inc(answer.sampled_tokens)
        reason = {Finish.CANCELLED: "abort"}.get(answer.completion.finish, answer.completion.finish.value)
        self.success.labels(model, reason).inc()
        self.whole.labels(model).observe(seconds)

    def read_cache(self, model: str, policy: Any) -> None:
        """Add what the engine's KV cache did since the last call."""
        decoder: Any = policy.engine.decoder if isinstance(policy, LocalPolicy) else None
        counts = getattr(decoder, "counts", None)
        if decoder is None or counts is None:  # a decoder that shares no prefixes
            return
        now = counts.prompt, counts.prompt - counts.prefilled
        before = self._counted.get(policy, (0, 0))
        if now[0] < before[0]:  # the engine was freed
            before = (0, 0)
        self._counted[policy] = now
        self.queries.labels(model).inc(now[0] - before[0])
        self.hits.labels(model).inc(max(0, now[1] - before[1]))
        self.kv_usage.labels(model).set(decoder.kv_usage)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class FairQueue:
    """Who is sampled next, of one event loop: the first choice of each request, then the second ones, and so
    on. Choices after the first leave a quarter of the places free: a request of many keeps nobody waiting."""

    def __init__(self, places: int) -> None:
        self._free, self._left, self._count = places, places // 4, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """heap of (number of the choice, order of arrival, place)"""

    @asynccontextmanager
    async def place(self, choice: int) -> AsyncIterator[None]:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (choice, self._count, place))
        self._call()
        try:
            await place
            yield
        finally:
            self._free += place.done() and not place.cancelled()
            self._call()

    def _call(self) -> None:
        while self._waiting and self._free > (self._left if self._waiting[0][0] else 0):
            *_, place = heapq.heappop(self._waiting)
            if not place.done():
                self._free -= 1
                place.set_result(None)


class Generation:
    """Samples the requests of clients in threads of its own, off the event loop."""

    def __init__(self, conversations: Conversations, metrics: ServerMetrics, limits: ServerLimits) -> None:
        self._conversations, self._metrics, self._limits = conversations, metrics, limits
        self._pool = ThreadPoolExecutor(limits.concurrent, thread_name_prefix="answer")
        self._in_flight = 0
        """choices of requests, waiting ones too"""
        self._queue = FairQueue(limits.concurrent)
        self._worked = False
        """whether anything was answered since `rests` was asked last"""

    def rests(self) -> bool:
        """Whether nothing is being answered, and something was since the last call."""
        if self._in_flight:
            return False
        worked, self._worked = self._worked, False
        return worked

    async def answers(
        self, request: Request, asked: Sequence[ModelRequest], model: ServedModel
    ) -> list[ModelAnswer]:
        """The answers to several requests of one client, which ends them all by going away.

        Raises BadRequest when too many requests wait, ClientGone, and what `Conversations.answer` raises.
        """
        client = Client.of(request)
        return await self.in_threads(
            request, client, [partial(self._sample, each, client, None, model) for each in asked]
        )

    async def in_threads(
        self, request: Request, client: Client, calls: Sequence[Callable[[], _T]]
    ) -> list[_T]:
        """Results of the calls, which count as one request. Raises as `answers`."""
        self._enter(len(calls))
        watching = asyncio.ensure_future(_gone(request, client))
        try:
            return list(await asyncio.gather(*self._submit(calls)))
        finally:
            client.connected.clear()
            watching.cancel()
            self._leave(len(calls))

    async def stream(
        self, request: Request, asked: Sequence[ModelRequest], model: ServedModel, writer: AnswerWriter
    ) -> Response:
        """The answers as server-sent events, while their tokens come. Raises as `answers`, before the first
        event: a refusal is the status of the answer.
        """
        self._enter(len(asked))
        stream = _Stream(Client.of(request), len(asked))
        loop = asyncio.get_running_loop()

        def sample(index: int) -> ModelAnswer:
            def on_text(delta: TextDelta) -> bool:
                loop.call_soon_threadsafe(stream.put, index, delta)
                return True

            return self._sample(asked[index], stream.client, on_text, model)

        stream.jobs = self._submit([partial(sample, index) for index in range(len(asked))])
        for index, job in enumerate(stream.jobs):
            job.add_done_callback(lambda _, index=index: stream.put(index, None))  # type: ignore[misc]
        # not in `events`, which never begins for a client that left at once
        stream.whole = asyncio.gather(*stream.jobs, return_exceptions=True)
        stream.whole.add_done_callback(lambda _: self._leave(len(asked)))
        await stream.first_event(request)
        return StreamingResponse(
            stream.events(writer, error_shape(request)),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    def close(self) -> None:
        """Wait for what is being sampled; what waits is cancelled."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, calls: Sequence[Callable[[], _T]]) -> list[asyncio.Future[_T]]:
        """Futures of the calls of one request, which run in threads as the queue lets them."""
        loop = asyncio.get_running_loop()

        async def run(call: Callable[[], _T], choice: int) -> _T:
            async with self._queue.place(choice):
                return await loop.run_in_executor(self._pool, call)

        return [asyncio.ensure_future(run(call, choice)) for choice, call in enumerate(calls)]

    def _enter(self, choices: int) -> None:
        most = self._limits.concurrent + self._limits.waiting
        if self._in_flight and self._in_flight + choices > most:
            raise BadRequest("too many requests wait; try again", status=429, code="rate_limit_exceeded")
        self._in_flight += choices
        self._worked = True
        self._note()

    def _leave(self, choices: int) -> None:
        self._in_flight -= choices
        self._note()

    def _note(self) -> None:
        running = min(self._in_flight, self._limits.concurrent)
        self._metrics.running.set(running)
        self._metrics.waiting.set(self._in_flight - running)

    def _sample(
        self, asked: ModelRequest, client: Client, on_text: OnText | None, model: ServedModel
    ) -> ModelAnswer:
        if not client.connected.is_set():
            raise ClientGone
        first = last = 0.0

        def emit(delta: TextDelta) -> bool:
            nonlocal first, last
            now = time.time()
            if (delta.text or delta.ids) and not first:
                first = now
                self._metrics.first.labels(model.name).observe(now - client.received)
            else:
                for _ in delta.ids:
                    self._metrics.between.labels(model.name).observe((now - last) / len(delta.ids))
            last = now
            if on_text is not None:
                on_text(delta)
            return client.connected.is_set()

        answer = self._conversations.answer(asked, client.session, emit, model, client.agent)
        self._metrics.answered(model.name, answer, time.time() - client.received)
        return answer


class _Stream:
    """The choices of one streamed request, sampled in threads and written as their tokens come."""

    jobs: list[asyncio.Future[ModelAnswer]]
    whole: asyncio.Future[Any]

    def __init__(self, client: Client, choices: int) -> None:
        self.client = client
        self._queue: asyncio.Queue[tuple[int, TextDelta | None]] = asyncio.Queue()
        self._begun = asyncio.Event()
        self._written = [""] * choices
        self._untold = [TextDelta()] * choices
        """tokens whose text is held back, since it may become a call"""

    def put(self, index: int, delta: TextDelta | None) -> None:
        """New text of a choice; None at its end."""
        self._queue.put_nowait((index, delta))
        if delta is None or delta.text or delta.ids:
            self._begun.set()

    async def first_event(self, request: Request) -> None:
        """Wait for it. Raises what a choice that has ended raised, and ends the others."""
        watching, begun = asyncio.ensure_future(_gone(request, self.client)), False
        try:
            await self._begun.wait()
            for job in self.jobs:
                if job.done():
                    job.result()
            begun = True
        finally:
            watching.cancel()
            if not begun:
                self.client.connected.clear()

    async def events(self, writer: AnswerWriter, error: Callable[..., dict[str, Any]]) -> AsyncIterator[str]:
        try:
            for index in range(len(self.jobs)):
                for event in writer.first(index):
                    yield _line(event)
            for _ in self.jobs:
                while (told := await self._queue.get())[1] is not None:
                    for event in self._text(writer, told[0], told[1]):
                        yield _line(event)
                try:
                    answer = await self.jobs[told[0]]
                except (NanoError, BadRequest) as problem:
                    yield _line(("error", writer.error(error(problem))))
                    return
                for event in self._end(writer, told[0], answer):
                    yield _line(event)
            for event in writer.close():
                yield _line(event)
        finally:
            self.client.connected.clear()
            if not self.whole.done():
                await asyncio.wait([self.whole])

    def _text(self, writer: AnswerWriter, index: int, delta: TextDelta) -> Iterable[Event]:
        delta = TextDelta(*map(add, self._untold[index], delta))
        self._untold[index] = TextDelta() if delta.text else delta
        if not delta.text:
            return ()
        self._written[index] += delta.text
        return writer.text(index, delta)

    def _end(self, writer: AnswerWriter, index: int, answer: ModelAnswer) -> Iterator[Event]:
        """What of the answer was not streamed, and its end."""
        rest = answer.text[len(self._written[index]) :]
        if rest and answer.text.startswith(self._written[index]):
            yield from writer.text(index, TextDelta(rest))
        yield from writer.end(index, answer)


def _line(event: Event) -> str:
    name, data = event
    text = "[DONE]" if data is None else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "") + f"data: {text}\n\n"


async def _gone(request: Request, client: Client) -> None:
    """Wait until the client goes away; its whole request has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    client.connected.clear()
