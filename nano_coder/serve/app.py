"""The application: routes, keys, bounds, and each API's own shape of errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve import anthropic, chat, responses, upstream
from nano_coder.serve.conversations import Conversations, ServedModel, UnknownSession
from nano_coder.serve.request import BadRequest, ModelAnswer, ModelRequest
from nano_coder.verify.trainable import hashes
from nano_shared.errors import BudgetExhausted, ConfigError, NanoError, PolicyError, UsageError
from nano_shared.printable import printable

_log = logging.getLogger("nano_coder.serve")
LARGEST_BODY = 32 << 20
"""bytes of a request"""
_SESSION_HEADER = "x-session-id"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    concurrent: int = 64
    """requests that are answered at a time; more wait"""
    waiting: int = 256
    """requests that may wait; further ones get 429"""
    idle_seconds: float = 600.0
    """after which a conversation's run is ended"""


class ServerMetrics:
    """Prometheus metrics, with vLLM's names."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model}
        self.running = self._gauge("num_requests_running", "Requests that are being answered.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait for a place.")
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self.sampled = self._counter("generation_tokens", "Sampled tokens.")
        self.success = self._counter("request_success", "Requests that were answered.")
        self.first = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.whole = self._histogram("e2e_request_latency_seconds", "From the request to its whole answer.")

    def _gauge(self, name: str, help: str) -> Any:
        return Gauge(f"vllm:{name}", help, ["model_name"], registry=self.registry).labels(**self._label)

    def _counter(self, name: str, help: str) -> Any:
        return Counter(f"vllm:{name}", help, ["model_name"], registry=self.registry).labels(**self._label)

    def _histogram(self, name: str, help: str) -> Any:
        return Histogram(f"vllm:{name}", help, ["model_name"], registry=self.registry).labels(**self._label)


class _Gone(Exception):
    """The client went away."""


Promoted = Callable[[], ServedModel | None]
"""the model that was promoted since the last call; None if none was"""
_SWEEP_SECONDS = 2.0


class Server:
    """Handlers of the routes. Answers are sampled in threads of its own, off the event loop."""

    def __init__(
        self,
        conversations: Conversations,
        *,
        keys: Sequence[str] = (),
        limits: ServerLimits | None = None,
        promoted: Promoted | None = None,
    ) -> None:
        limits = limits or ServerLimits()
        self._conversations = conversations
        self._promoted = promoted
        self._keys = tuple(keys)
        self._limits = limits
        self._metrics = ServerMetrics(conversations.model.name)
        self._pool = ThreadPoolExecutor(limits.concurrent, thread_name_prefix="answer")
        self._in_flight = 0
        self._started = int(time.time())

        self._hosts: dict[LocalPolicy, Future[None]] = {}
        """policies with a thread that steps their engine, until the future is done"""

    @property
    def _model(self) -> str:
        return self._conversations.model.name

    @property
    def _policy(self) -> Any:
        return self._conversations.model.policy

    def _decode(self) -> Any:
        return getattr(self._policy, "decode", None)

    # ------------------------------------------------------------------------------------- routes

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        policy, profile = self._policy, self._conversations.model.profile
        card = {
            "id": self._model, "object": "model", "created": self._started, "owned_by": "nano",
            "max_model_len": policy.context_limit, "meta": {"context_length": policy.context_limit},
            "root": policy.id, "weight_version": policy.version,
            "profile": profile.name, "profile_hash": hashes(profile)[0],
            "template_hash": policy.template_hash,
            "gives_tokens": not isinstance(policy, EndpointPolicy) or policy.card.gives_tokens,
        }  # fmt: skip
        wanted = request.path_params.get("model")
        if wanted is not None:
            if wanted != self._model:
                raise BadRequest(
                    f"no model {wanted!r:.100}; there is {self._model}", status=404, code="model_not_found"
                )
            return JSONResponse(card)
        return JSONResponse({"object": "list", "data": [card], "models": [card]})

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        behind = self._conversations.model.upstream
        asked = chat.read_chat({**body, "response_format": None} if behind else body, self._longest)
        asked = replace(asked, more=upstream.passed_on(body)) if behind else asked
        choices = chat.number(body, "n", int, 1, chat.MOST_CHOICES, 1)
        id = f"chatcmpl-{secrets.token_hex(12)}"
        if body.get("stream"):
            if choices > 1:
                raise BadRequest("n > 1 is not streamed; leave out `stream`", param="n")
            chunks = chat.ChatChunks(body, self._model, self._decode(), id)
            return await self._stream(
                request, asked, first=lambda: [_data(chunks.first())],
                text=lambda *given: [_data(chunks.text(*given))],
                end=lambda answer: [*map(_data, chunks.end(answer)), "data: [DONE]\n\n"],
            )  # fmt: skip
        answers = await self._answers(request, [_choice(asked, index) for index in range(choices)])
        return JSONResponse(chat.chat_answer(body, answers, self._model, self._decode(), id))

    async def messages(self, request: Request) -> Response:
        body = await self._body(request)
        asked = anthropic.read_messages(body, self._longest)
        id = f"msg_{secrets.token_hex(12)}"
        if body.get("stream"):
            return await self._stream(
                request, asked, **_named(anthropic.MessageEvents(body, self._model, id))
            )
        (answer,) = await self._answers(request, [asked])
        return JSONResponse(anthropic.message_answer(body, answer, self._model, id))

    async def count_tokens(self, request: Request) -> Response:
        body = await self._body(request)
        asked = anthropic.read_messages({"max_tokens": 1, **body}, self._longest)
        count = sum(self._policy.count(m.text) for m in asked.messages)
        return JSONResponse({"input_tokens": count})

    async def responses(self, request: Request) -> Response:
        body = await self._body(request)
        asked = responses.read_response(body, self._longest)
        id = f"resp_{secrets.token_hex(12)}"
        if body.get("stream"):
            return await self._stream(
                request, asked, **_named(responses.ResponseEvents(body, self._model, id))
            )
        (answer,) = await self._answers(request, [asked])
        return JSONResponse(responses.response_answer(body, answer, self._model, id))

    async def session(self, request: Request) -> Response:
        session = request.path_params["session"]
        try:
            runs = await asyncio.to_thread(self._conversations.runs, session)
            return JSONResponse({"session": session, "runs": runs})
        except UnknownSession:
            raise BadRequest(f"no conversation in session {session!r:.100}", status=404) from None

    async def reward(self, request: Request) -> Response:
        body, session = await self._body(request), request.path_params["session"]
        value = chat.number(body, "reward", float, -1e6, 1e6, None)
        if value is None:
            raise BadRequest('reward is missing; send {"reward": 1}', param="reward")
        components = body.get("components") or {}
        if not isinstance(components, Mapping) or not all(
            isinstance(v, int | float) for v in components.values()
        ):
            raise BadRequest("components must be numbers by name", param="components")
        give, replace = self._conversations.reward, body.get("replace") is True
        try:
            runs = await asyncio.to_thread(give, session, value, dict(components), replace=replace)
        except UnknownSession:
            raise BadRequest(f"no conversation in session {session!r:.100}", status=404) from None
        except UsageError as problem:
            raise BadRequest(str(problem), status=409, param="replace") from None
        return JSONResponse({"session": session, "runs": runs, "reward": value})

    # ---------------------------------------------------------------------------------- answering

    @property
    def _longest(self) -> int:
        return int(self._policy.context_limit)

    def _enter(self) -> None:
        if self._in_flight >= self._limits.concurrent + self._limits.waiting:
            raise BadRequest("too many requests wait; try again", status=429, code="rate_limit_exceeded")
        self._in_flight += 1
        self._note()

    def _leave(self) -> None:
        self._in_flight -= 1
        self._note()

    def _note(self) -> None:
        running = min(self._in_flight, self._limits.concurrent)
        self._metrics.running.set(running)
        self._metrics.waiting.set(self._in_flight - running)

    def _sample(
        self, asked: ModelRequest, caller: _Caller, on_text: Any, here: threading.Event
    ) -> ModelAnswer:
        if not here.is_set():
            raise _Gone
        began = time.monotonic()
        told = False

        def emit(text: str, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> bool:
            nonlocal told
            if (text or ids) and not told:
                told = True
                self._metrics.first.observe(time.monotonic() - began)
            if on_text is not None:
                on_text(text, ids, logprobs)
            return here.is_set()

        answer = self._conversations.answer(asked, caller.session, emit, caller.agent)
        self._metrics.prompt.inc(answer.prompt_tokens)
        self._metrics.sampled.inc(answer.sampled_tokens)
        self._metrics.success.inc()
        self._metrics.whole.observe(time.monotonic() - began)
        return answer

    async def _answers(self, request: Request, asked: Sequence[ModelRequest]) -> list[ModelAnswer]:
        """The answers to several requests of one client, which ends them all by going away."""
        here = threading.Event()
        here.set()
        self._enter()
        watching = asyncio.ensure_future(_gone(request, here))
        try:
            loop, caller = asyncio.get_running_loop(), _caller(request)
            jobs = [
                loop.run_in_executor(self._pool, self._sample, each, caller, None, here) for each in asked
            ]
            return list(await asyncio.gather(*jobs))
        finally:
            here.clear()
            watching.cancel()
            self._leave()

    async def _stream(
        self, request: Request, asked: ModelRequest, *,
        first: Callable[[], Sequence[str]],
        text: Callable[..., Sequence[str]],
        end: Callable[[ModelAnswer], Sequence[str]],
    ) -> Response:  # fmt: skip
        """Server-sent events: those of `first`, of `text` while tokens come, and of `end`."""
        self._enter()
        caller, error = _caller(request), _error_body(request)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()
        here = threading.Event()
        here.set()

        begun = asyncio.Event()

        def put(given: tuple[Any, ...] | None) -> None:
            queue.put_nowait(given)
            if given is None or given[0]:
                begun.set()

        def on_text(*given: Any) -> None:
            loop.call_soon_threadsafe(put, given)

        def sample() -> ModelAnswer:
            return self._sample(asked, caller, on_text, here)

        job = loop.run_in_executor(self._pool, sample)
        job.add_done_callback(lambda _: put(None))
        # not in `events`, which never begins for a client that left at once
        job.add_done_callback(lambda _: self._leave())

        if self._conversations.model.upstream:  # whose refusal is the answer's status
            watching = asyncio.ensure_future(_gone(request, here))
            await begun.wait()
            watching.cancel()
            if job.done():
                job.result()

        async def events() -> AsyncIterator[str]:
            try:
                for line in first():
                    yield line
                said = ""
                while (given := await queue.get()) is not None:
                    if given[0]:
                        said += given[0]
                        for line in text(*given):
                            yield line
                try:
                    answer = await job
                except (NanoError, BadRequest) as problem:
                    yield f"event: error\n{_data(error(_sentence(problem), _status(problem)[1]))}"
                    return
                if (rest := answer.text[len(said) :]) and answer.text.startswith(said):
                    for line in text(rest, (), ()):
                        yield line
                for line in end(answer):
                    yield line
            finally:
                here.clear()
                if not job.done():
                    await asyncio.wait([job])
                job.cancelled() or job.exception()

        return StreamingResponse(
            events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    # ------------------------------------------------------------------------------------ requests

    async def _body(self, request: Request) -> Mapping[str, Any]:
        size, parts = 0, []
        async for part in request.stream():
            size += len(part)
            if size > LARGEST_BODY:
                raise BadRequest(f"the request is longer than {LARGEST_BODY >> 20} MiB", status=413)
            parts.append(part)
        try:
            body = _plain(json.loads(b"".join(parts), parse_constant=_no_number))
        except (ValueError, RecursionError):
            raise BadRequest("the request is no JSON") from None
        if not isinstance(body, dict):
            raise BadRequest("the request must be a JSON object")
        return body

    def check(self, request: Request) -> None:
        """Raises BadRequest for a wrong key, and for a host name that is not this server's."""
        if self._keys:
            given = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix(
                "Bearer "
            )
            if not any([hmac.compare_digest(given.encode(), key.encode()) for key in self._keys]):
                raise BadRequest("wrong or missing API key", status=401, code="invalid_api_key")
        elif _host(request) not in _LOOPBACK:  # a page of the web whose name resolves to this machine
            raise BadRequest(f"this server does not answer to the host {_host(request)!r:.100}", status=403)

    def start(self) -> None:
        policy = self._policy
        if isinstance(policy, LocalPolicy) and policy not in self._hosts:
            stopping: Future[None] = Future()
            self._hosts[policy] = stopping
            threading.Thread(target=_lead, args=(policy, stopping), name="engine", daemon=True).start()

    def follow(self) -> None:
        """Answer by the model that was promoted since; what is in flight ends with the one it began with."""
        if self._promoted is None:
            return
        try:
            model = self._promoted()
        except NanoError as problem:
            _log.warning("the promoted model is not served: %s", problem)
            return
        if model is not None:
            self._conversations.model = model
            self.start()
            _log.warning("serving %s from now on", model.name)
        for policy in self._conversations.unused(tuple(self._hosts)):
            self._hosts.pop(policy).set_result(None)

    def stop(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for stopping in self._hosts.values():
            stopping.set_result(None)
        self._conversations.end_all()

    async def sweep(self) -> None:
        """Follow promotions and end idle conversations, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            await asyncio.to_thread(self.follow)
            await asyncio.to_thread(self._conversations.end_idle, self._limits.idle_seconds)


def serve_app(
    conversations: Conversations,
    *,
    keys: Sequence[str] = (),
    limits: ServerLimits | None = None,
    promoted: Promoted | None = None,
) -> Starlette:
    """The application over these conversations. `promoted` is asked every two seconds."""
    server = Server(conversations, keys=keys, limits=limits, promoted=promoted)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.start()
        sweeping = asyncio.ensure_future(server.sweep())
        yield
        sweeping.cancel()
        await asyncio.to_thread(server.stop)

    routes = [Route("/health", server.health), Route("/metrics", _endpoint(server, server.metrics))]
    routes += [*_apis(server, ""), *_apis(server, "/sessions/{session}")]
    routes += [
        Route("/sessions/{session}", _endpoint(server, server.session)),
        Route("/sessions/{session}/reward", _endpoint(server, server.reward), methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def episode_app(conversations: Conversations) -> Starlette:
    """The application of one foreign agent: the APIs alone, so that it cannot reward itself."""
    return Starlette(routes=_apis(Server(conversations), ""))


def _apis(server: Server, prefix: str) -> list[Route]:
    posts = {
        "chat/completions": server.chat, "messages": server.messages, "responses": server.responses,
        "messages/count_tokens": server.count_tokens,
    }  # fmt: skip
    return [
        Route(f"{prefix}/v1/models", _endpoint(server, server.models)),
        Route(f"{prefix}/v1/models/{{model:path}}", _endpoint(server, server.models)),
        *(Route(f"{prefix}/v1/{p}", _endpoint(server, h), methods=["POST"]) for p, h in posts.items()),
    ]


def _lead(policy: LocalPolicy, stopping: Future[None]) -> None:
    with policy.hosted() as lead:
        lead(stopping)


def _endpoint(server: Server, handler: Any) -> Any:
    async def endpoint(request: Request) -> Response:
        try:
            server.check(request)
            response: Response = await handler(request)
        except (NanoError, BadRequest) as problem:
            status, kind = _status(problem)
            after = getattr(problem, "after", None)
            wait = 1 if after is None and status in (429, 503) else after
            headers = None if wait is None else {"Retry-After": f"{math.ceil(wait)}"}
            body = _error_body(request)(
                _sentence(problem), kind, getattr(problem, "param", None), getattr(problem, "code", None)
            )
            return JSONResponse(body, status_code=status, headers=headers)
        except (_Gone, ClientDisconnect):
            return Response(status_code=499)
        return response

    return endpoint


def _no_number(name: str) -> None:
    raise ValueError(name)


def _plain(value: Any) -> Any:
    """JSON without halves of surrogate pairs, which nothing can encode."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    return value


def _sentence(problem: Exception) -> str:
    return printable(str(problem), 1000)


_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
}  # fmt: skip
"""HTTP status -> OpenAI's type of an error"""


def _status(problem: Exception) -> tuple[int, str]:
    """HTTP status and OpenAI's type of an error."""
    if isinstance(problem, BadRequest):
        return problem.status, _KINDS.get(problem.status, "invalid_request_error")
    if isinstance(problem, EndpointError):
        status = upstream.status(problem)
        return status, _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if isinstance(problem, ConfigError):  # the key for the server behind
        return 502, "api_error"
    if isinstance(problem, BudgetExhausted):
        return 400, "invalid_request_error"
    return (503 if isinstance(problem, PolicyError) else 500), "api_error"


def _error_body(request: Request) -> Callable[..., dict[str, Any]]:
    if "/messages" in request.url.path:
        return lambda text, kind, param=None, code=None: {
            "type": "error", "error": {"type": kind, "message": text},
        }  # fmt: skip
    return lambda text, kind, param=None, code=None: {
        "error": {"message": text, "type": kind, "param": param, "code": code}
    }


def _data(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


def _named(events: anthropic.MessageEvents | responses.ResponseEvents) -> dict[str, Any]:
    def written(told: Iterator[tuple[str, dict[str, Any]]]) -> list[str]:
        return [f"event: {name}\n{_data(data)}" for name, data in told]

    return {
        "first": lambda: written(events.first()),
        "text": lambda *given: written(events.text(*given)),
        "end": lambda answer: written(events.end(answer)),
    }


def _choice(asked: ModelRequest, index: int) -> ModelRequest:
    seed = asked.sampling.seed
    if index == 0 or seed is None:
        return asked
    return replace(asked, sampling=asked.sampling.model_copy(update={"seed": seed + index}))


class _Caller(NamedTuple):
    session: str
    agent: str


def _caller(request: Request) -> _Caller:
    session = request.path_params.get("session") or request.headers.get(_SESSION_HEADER, "")
    return _Caller(str(session)[:200], request.headers.get("user-agent", "")[:200])


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    return host if host.endswith("]") else host.rpartition(":")[0] or host


async def _gone(request: Request, here: threading.Event) -> None:
    """Wait until the client goes away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)
    here.clear()
