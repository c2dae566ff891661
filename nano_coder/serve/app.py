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
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nano_coder.agent.dialects.registry import DIALECTS
from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.models.endpoint.policy import EndpointPolicy
from nano_coder.models.local.constraint import MISSING
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import locate
from nano_coder.serve import anthropic, chat, completions, responses, upstream
from nano_coder.serve.adapters import Adapters, lineage_card
from nano_coder.serve.answer_form import grammar_of
from nano_coder.serve.completions import CompletionRequest
from nano_coder.serve.conversations import Conversations, ServedModel, UnknownSession
from nano_coder.serve.request import BadRequest, ModelAnswer, ModelRequest
from nano_coder.serve.tracing import RequestTimes, Tracing
from nano_coder.verify.trainable import hashes
from nano_shared.errors import BudgetExhausted, ConfigError, NanoError, PolicyError, UsageError
from nano_shared.printable import printable
from nano_shared.types import Finish

if TYPE_CHECKING:
    from nano_coder.models.local.engine import TokenScore

_log = logging.getLogger("nano_coder.serve")
LARGEST_BODY = 32 << 20
"""bytes of a request"""
_SESSION_HEADER = "x-session-id"
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})


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
        self.running = self._new(Gauge, "num_requests_running", "Requests that are being answered.").labels(
            model
        )
        self.waiting = self._new(Gauge, "num_requests_waiting", "Requests that wait for a place.").labels(
            model
        )
        self.kv_usage = self._new(Gauge, "kv_cache_usage_perc", "Share of the KV budget in use; 1 is full.")
        self.prompt = self._new(Counter, "prompt_tokens", "Tokens of prompts.")
        self.sampled = self._new(Counter, "generation_tokens", "Sampled tokens.")
        self.queries = self._new(Counter, "prefix_cache_queries", "Prompt tokens looked up in the KV cache.")
        self.hits = self._new(Counter, "prefix_cache_hits", "Prompt tokens whose KV was cached.")
        self.success = self._new(
            Counter, "request_success", "Requests that were answered.", "finished_reason"
        )
        self.first = self._new(
            Histogram, "time_to_first_token_seconds", "From the request to its first token."
        )
        self.between = self._new(Histogram, "inter_token_latency_seconds", "Between two tokens of an answer.")
        self.whole = self._new(
            Histogram, "e2e_request_latency_seconds", "From the request to its whole answer."
        )
        self._counted: WeakKeyDictionary[LocalPolicy, tuple[int, int]] = WeakKeyDictionary()
        for metric in (
            self.prompt,
            self.sampled,
            self.queries,
            self.hits,
            self.first,
            self.between,
            self.whole,
        ):
            metric.labels(model)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Who asks, in which session, and since when."""

    session: str
    agent: str
    """its user agent"""
    headers: Mapping[str, str]
    received: float
    """unix seconds"""

    @classmethod
    def of(cls, request: Request) -> Client:
        return cls(
            session=_session(request), agent=request.headers.get("user-agent", "")[:200],
            headers=request.headers, received=time.time(),
        )  # fmt: skip


class _Gone(Exception):
    """The client went away."""


Promoted = Callable[[], ServedModel | None]
"""the model that was promoted since the last call; None if none was"""
_PASSED_ON = {"response_format": None, "tool_choice": None}
"""what the server behind reads itself"""
_SWEEP_SECONDS = 2.0
_DONE = "data: [DONE]\n\n"


class Server:
    """Handlers of the routes. Answers are sampled in threads of its own, off the event loop."""

    def __init__(
        self,
        conversations: Conversations,
        *,
        keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        limits: ServerLimits | None = None,
        promoted: Promoted | None = None,
        adapters: Adapters | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Without `admin_keys` nobody loads adapters."""
        limits = limits or ServerLimits()
        self._conversations = conversations
        self._promoted, self._adapters, self._tracing = promoted, adapters, tracing
        self._keys, self._admin_keys = tuple(keys), tuple(admin_keys)
        self._limits = limits
        self._metrics = ServerMetrics(conversations.model.name)
        self._pool = ThreadPoolExecutor(limits.concurrent, thread_name_prefix="answer")
        self._in_flight = 0
        self._starting = threading.Lock()
        self._started = int(time.time())

        self._hosts: dict[LocalPolicy, Future[None]] = {}
        """policies with a thread that steps their engine, until the future is done"""

    @property
    def _model(self) -> str:
        return self._conversations.model.name

    @property
    def _policy(self) -> Any:
        return self._conversations.model.policy

    async def _asked(self, body: Mapping[str, Any]) -> ServedModel:
        """The model that a request names: an adapter, else the one that is served. Raises BadRequest."""
        name = body.get("model")
        if self._adapters is None or not isinstance(name, str) or self._model in (name, locate(name)):
            return self._conversations.model
        found = await asyncio.to_thread(self._adapters.find, name)
        if found is None:
            return self._conversations.model
        self._host(found.policy)
        return found

    # ------------------------------------------------------------------------------------- routes

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        for name, policy in self._served():
            self._metrics.read_cache(name, policy)
        return Response(generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4")

    def _served(self) -> list[tuple[str, Any]]:
        adapters = self._adapters.opened() if self._adapters else []
        return [(model.name, model.policy) for model in (self._conversations.model, *adapters)]

    async def models(self, request: Request) -> Response:
        cards = await asyncio.to_thread(self._cards)
        wanted = request.path_params.get("model")
        if wanted is not None:
            card = next((card for card in cards if card["id"] == wanted), None)
            if card is None:
                raise BadRequest(
                    f"no model {wanted!r:.100}; there is {self._model}", status=404, code="model_not_found"
                )
            return JSONResponse(card)
        return JSONResponse({"object": "list", "data": cards, "models": cards})

    def _cards(self) -> list[dict[str, Any]]:
        policy, base = self._policy, self._adapters.base if self._adapters else None
        usual = {
            "object": "model", "created": self._started, "owned_by": "nano",
            "max_model_len": policy.context_limit, "meta": {"context_length": policy.context_limit},
        }  # fmt: skip
        mine = {"id": self._model, **usual}
        if base is not None:
            mine |= lineage_card(Path(locate(self._model)), base if base != self._model else None)
        profile = self._conversations.model.profile
        mine |= {
            "root": policy.id, "weight_version": policy.version,
            "profile": profile.name, "profile_hash": hashes(profile)[0],
            "template_hash": policy.template_hash,
            "gives_tokens": not isinstance(policy, EndpointPolicy) or policy.card.gives_tokens,
        }  # fmt: skip
        return [mine, *({**usual, **card} for card in (self._adapters.cards() if self._adapters else ()))]

    async def load_adapter(self, request: Request) -> Response:
        adapters, body = self._administered(request), await self._body(request)
        name, path = (body.get(key) for key in ("lora_name", "lora_path"))
        if not isinstance(name, str) or not isinstance(path, str) or name == self._model:
            raise BadRequest("lora_name and lora_path must be texts, the name not that of the served model")
        replace = bool(body.get("load_inplace"))
        await asyncio.to_thread(adapters.load, name, path, replace=replace)
        return JSONResponse({"loaded": name})

    async def unload_adapter(self, request: Request) -> Response:
        adapters, body = self._administered(request), await self._body(request)
        name = body.get("lora_name")
        if not isinstance(name, str):
            raise BadRequest("lora_name must be a text", param="lora_name")
        await asyncio.to_thread(adapters.unload, name)
        return JSONResponse({"unloaded": name})

    def _administered(self, request: Request) -> Adapters:
        """Raises BadRequest without an admin key, and for a model that has no adapters."""
        if not self._admin_keys:
            raise BadRequest("this server loads no adapters: start it with --admin-key", status=403)
        if not _has_key(request, self._admin_keys):
            raise BadRequest("wrong or missing admin key", status=401, code="invalid_api_key")
        if self._adapters is None:
            raise BadRequest("only local weights take adapters, and this server has none")
        return self._adapters

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        policy = _local((await self._asked(body)).policy)
        if body.get("messages") is not None:
            asked = chat.read_chat(body, policy.context_limit)
            ids = await asyncio.to_thread(self._conversations.rendered_ids, asked, policy)
        else:
            control = body.get("add_special_tokens", True) is not False
            ids = completions.prompt_ids(body.get("prompt"), policy, control=control, param="prompt")
        told = {"count": len(ids), "max_model_len": policy.context_limit, "tokens": list(ids)}
        texts = [policy.decode([token]) for token in ids] if body.get("return_token_strs") else None
        return JSONResponse({**told, "token_strs": texts})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request)
        policy = _local((await self._asked(body)).policy)
        tokens = body.get("tokens")
        ids = completions.prompt_ids(tokens if isinstance(tokens, list) else None, policy, param="tokens")
        return JSONResponse({"prompt": policy.decode(ids)})

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        model = await self._asked(body)
        asked = await asyncio.to_thread(completions.read_completion, body, model.policy)
        policy, id = _local(model.policy), f"cmpl-{secrets.token_hex(12)}"
        writer = completions.CompletionWriter(body, asked, policy.decode, model.name, id)
        if asked.scores:
            scores = await self._scores(request, asked, model)
            return JSONResponse(writer.scored(scores))
        if body.get("stream"):
            options = body.get("stream_options")
            usage = bool(isinstance(options, Mapping) and options.get("include_usage"))
            return await self._stream(
                request, asked.requests, model,
                first=lambda at: [_data(chunk)] if (chunk := writer.first(at)) else [],
                text=lambda at, *given: [_data(writer.text(at, *given))],
                end=lambda at, answer: [_data(writer.end(at, answer))],
                close=lambda: [*([_data(writer.closing())] if usage else ()), _DONE],
            )  # fmt: skip
        answers = await self._answers(request, asked.requests, model)
        echoes = asked.echo and asked.logprobs is not None
        scores = await self._scores(request, asked, model, log=False) if echoes else []
        return JSONResponse(writer.whole(answers, scores))

    async def _scores(
        self, request: Request, asked: CompletionRequest, model: ServedModel, *, log: bool = True
    ) -> list[list[TokenScore]]:
        """Of each prompt: the log-probs of its tokens after the first."""
        policy, session = _local(model.policy), _session(request)
        if self._conversations.is_rollout:  # the module may be in training elsewhere
            raise BadRequest("prompts are not scored in a rollout", param="prompt")
        if any(len(each.prompt_ids) > policy.context_limit for each in asked.requests):
            raise BadRequest(f"a prompt is longer than {policy.context_limit} tokens", param="prompt")

        def score(each: ModelRequest) -> list[TokenScore]:
            if log:
                self._conversations.log_scored(each, session, model)
            return policy.score(each.prompt_ids, asked.logprobs or 0, temperature=1.0)

        self._enter()
        try:
            loop = asyncio.get_running_loop()
            return [await loop.run_in_executor(self._pool, score, each) for each in asked.requests]
        finally:
            self._leave()

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        model = await self._asked(body)
        if model.upstream:  # it answers for what it is passed
            asked = chat.read_chat({**body, **_PASSED_ON}, model.policy.context_limit)
            asked = replace(asked, more=upstream.passed_on(body))
        else:
            asked = await self._formed(chat.read_chat(body, model.policy.context_limit), model)
        decode = getattr(model.policy, "decode", None)
        choices = chat.number(body, "n", int, 1, chat.MOST_CHOICES, 1)
        id = f"chatcmpl-{secrets.token_hex(12)}"
        if body.get("stream"):
            chunks = [chat.ChatChunks(body, model.name, decode, id, index) for index in range(choices)]
            return await self._stream(
                request, [completions.seeded(asked, index) for index in range(choices)], model,
                first=lambda at: [_data(chunks[at].first())],
                text=lambda at, *given: [_data(chunks[at].text(*given))],
                end=lambda at, answer: list(map(_data, chunks[at].end(answer))),
                close=lambda: [*map(_data, chat.closing_chunks(chunks)), _DONE],
            )  # fmt: skip
        requests = [completions.seeded(asked, index) for index in range(choices)]
        answers = await self._answers(request, requests, model)
        return JSONResponse(chat.chat_answer(body, answers, model.name, decode, id))

    async def messages(self, request: Request) -> Response:
        body = await self._body(request)
        model = await self._asked(body)
        asked = await self._formed(anthropic.read_messages(body, model.policy.context_limit), model)
        id = f"msg_{secrets.token_hex(12)}"
        if body.get("stream"):
            events = anthropic.MessageEvents(body, model.name, id)
            return await self._stream(request, [asked], model, **_named(events))
        (answer,) = await self._answers(request, [asked], model)
        return JSONResponse(anthropic.message_answer(body, answer, model.name, id))

    async def count_tokens(self, request: Request) -> Response:
        body = await self._body(request)
        policy = (await self._asked(body)).policy
        asked = anthropic.read_messages({"max_tokens": 1, **body}, policy.context_limit)
        count = sum(policy.count(m.text) for m in asked.messages)
        return JSONResponse({"input_tokens": count})

    async def responses(self, request: Request) -> Response:
        body = await self._body(request)
        model = await self._asked(body)
        asked = await self._formed(responses.read_response(body, model.policy.context_limit), model)
        id = f"resp_{secrets.token_hex(12)}"
        if body.get("stream"):
            events = responses.ResponseEvents(body, model.name, id)
            return await self._stream(request, [asked], model, **_named(events))
        (answer,) = await self._answers(request, [asked], model)
        return JSONResponse(responses.response_answer(body, answer, model.name, id))

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

    async def _formed(self, asked: ModelRequest, model: ServedModel) -> ModelRequest:
        """The request with the grammar that forces its form. Raises BadRequest where none can."""
        form, policy = asked.form, model.policy
        if form.any:
            return asked
        param = "tool_choice" if form.calls else form.param
        if not isinstance(policy, LocalPolicy):
            raise BadRequest(f"{param}: only local weights can be constrained", param=param)

        def compiled() -> str:
            dialect = DIALECTS.find(model.profile.dialect)
            try:
                grammar = grammar_of(form, asked.tools, dialect, policy.template.encoder.added_tokens)
                policy.check_grammar(grammar)
            except ModuleNotFoundError:
                raise BadRequest(f"{param}: {MISSING}", status=501, param=param) from None
            except (UsageError, ValueError) as problem:
                raise BadRequest(f"{param} cannot be constrained: {problem}", param=param) from None
            return grammar

        sampling = asked.sampling.model_copy(update={"grammar": await asyncio.to_thread(compiled)})
        return replace(asked, sampling=sampling)

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
        self, asked: ModelRequest, client: Client, on_text: Any, here: threading.Event, model: ServedModel
    ) -> ModelAnswer:
        if not here.is_set():
            raise _Gone
        began = time.time()
        first = last = 0.0

        def emit(text: str, ids: tuple[int, ...], logprobs: tuple[float, ...]) -> bool:
            nonlocal first, last
            now = time.time()
            if (text or ids) and not first:
                first = now
                self._metrics.first.labels(model.name).observe(now - client.received)
            elif ids:
                for _ in ids:
                    self._metrics.between.labels(model.name).observe((now - last) / len(ids))
            last = now
            if on_text is not None:
                on_text(text, ids, logprobs)
            return here.is_set()

        def times() -> RequestTimes:
            now = time.time()
            return RequestTimes(received=client.received, began=began, first=first or now, ended=now)

        try:
            answer = self._conversations.answer(asked, client.session, emit, model, client.agent)
        except NanoError as problem:
            if self._tracing is not None:
                self._tracing.failed(problem, times(), client.headers, client.session)
            raise
        self._metrics.answered(model.name, answer, time.time() - client.received)
        if self._tracing is not None:
            self._tracing.answered(asked, answer, times(), client.headers, client.session)
        return answer

    async def _answers(
        self, request: Request, asked: Sequence[ModelRequest], model: ServedModel
    ) -> list[ModelAnswer]:
        """The answers to several requests of one client, which ends them all by going away."""
        here = threading.Event()
        here.set()
        self._enter()
        watching = asyncio.ensure_future(_gone(request, here))
        try:
            loop, client = asyncio.get_running_loop(), Client.of(request)
            jobs = [
                loop.run_in_executor(self._pool, self._sample, each, client, None, here, model)
                for each in asked
            ]
            return list(await asyncio.gather(*jobs))
        finally:
            here.clear()
            watching.cancel()
            self._leave()

    async def _stream(
        self, request: Request, asked: Sequence[ModelRequest], model: ServedModel, *,
        first: Callable[[int], Sequence[str]],
        text: Callable[..., Sequence[str]],
        end: Callable[[int, ModelAnswer], Sequence[str]],
        close: Callable[[], Sequence[str]] = tuple,
    ) -> Response:  # fmt: skip
        """Server-sent events: of each choice those of `first`, of `text` while tokens come, and of `end`."""
        self._enter()
        client, error = Client.of(request), _error_body(request)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, tuple[Any, ...] | None]] = asyncio.Queue()
        here = threading.Event()
        here.set()

        begun = asyncio.Event()

        def put(index: int, given: tuple[Any, ...] | None) -> None:
            queue.put_nowait((index, given))
            if given is None or given[0]:
                begun.set()

        def sample(index: int) -> ModelAnswer:
            def on_text(*given: Any) -> None:
                loop.call_soon_threadsafe(put, index, given)

            return self._sample(asked[index], client, on_text, here, model)

        jobs = [loop.run_in_executor(self._pool, sample, index) for index in range(len(asked))]
        for index, job in enumerate(jobs):
            job.add_done_callback(lambda _, index=index: put(index, None))  # type: ignore[misc]
        # not in `events`, which never begins for a client that left at once
        whole = asyncio.gather(*jobs, return_exceptions=True)
        whole.add_done_callback(lambda _: self._leave())

        if model.upstream:  # whose refusal is the answer's status
            watching = asyncio.ensure_future(_gone(request, here))
            await begun.wait()
            watching.cancel()
            for job in jobs:
                if job.done():
                    job.result()

        async def events() -> AsyncIterator[str]:
            said = [""] * len(jobs)
            try:
                for index in range(len(jobs)):
                    for line in first(index):
                        yield line
                for _ in jobs:
                    while (event := await queue.get())[1] is not None:
                        index, given = event
                        if given and given[0]:
                            said[index] += given[0]
                            for line in text(index, *given):
                                yield line
                    index = event[0]
                    try:
                        answer = await jobs[index]
                    except (NanoError, BadRequest) as problem:
                        yield f"event: error\n{_data(error(_sentence(problem), _status(problem)[1]))}"
                        return
                    rest = answer.text[len(said[index]) :]
                    if rest and answer.text.startswith(said[index]):
                        for line in text(index, rest, (), ()):
                            yield line
                    for line in end(index, answer):
                        yield line
                for line in close():
                    yield line
            finally:
                here.clear()
                if not whole.done():
                    await asyncio.wait([whole])

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
            if not _has_key(request, (*self._keys, *self._admin_keys)):
                raise BadRequest("wrong or missing API key", status=401, code="invalid_api_key")
        elif _host(request) not in _LOOPBACK:  # a page of the web whose name resolves to this machine
            raise BadRequest(f"this server does not answer to the host {_host(request)!r:.100}", status=403)
        elif (origin := request.headers.get("origin")) and urlsplit(origin).hostname not in _LOOPBACK:
            raise BadRequest(f"this server does not answer to pages of {origin!r:.100}", status=403)

    def start(self) -> None:
        self._host(self._policy)

    def _host(self, policy: Any) -> None:
        """Start the thread that steps this policy's engine, where there is none."""
        with self._starting:
            if isinstance(policy, LocalPolicy) and policy not in self._hosts:
                stopping: Future[None] = Future()
                self._hosts[policy] = stopping
                threading.Thread(target=_lead, args=(policy, stopping), name="engine", daemon=True).start()

    def follow(self) -> None:
        """Answer by the model that was promoted since; what is in flight ends with the one it began with."""
        try:
            model = self._promoted() if self._promoted is not None else None
        except NanoError as problem:
            _log.warning("the promoted model is not served: %s", problem)
            model = None
        if model is not None:
            self._conversations.model = model
            self.start()
            _log.warning("serving %s from now on", model.name)
        kept = [model.policy for model in self._adapters.opened()] if self._adapters else []
        for policy in self._conversations.unused(tuple(self._hosts), kept):
            self._hosts.pop(policy).set_result(None)
            policy.rest()

    def stop(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for stopping in self._hosts.values():
            stopping.set_result(None)
        self._conversations.end_all()
        if self._tracing is not None:
            self._tracing.close()

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
    admin_keys: Sequence[str] = (),
    limits: ServerLimits | None = None,
    promoted: Promoted | None = None,
    adapters: Adapters | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """The application over these conversations. `promoted` is asked every two seconds."""
    server = Server(
        conversations, keys=keys, admin_keys=admin_keys, limits=limits, promoted=promoted, adapters=adapters,
        tracing=tracing,
    )  # fmt: skip

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
        Route("/v1/load_lora_adapter", _endpoint(server, server.load_adapter), methods=["POST"]),
        Route("/v1/unload_lora_adapter", _endpoint(server, server.unload_adapter), methods=["POST"]),
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
        "messages/count_tokens": server.count_tokens, "completions": server.completions,
    }  # fmt: skip
    plain = {"tokenize": server.tokenize, "detokenize": server.detokenize}
    return [
        Route(f"{prefix}/v1/models", _endpoint(server, server.models)),
        Route(f"{prefix}/v1/models/{{model:path}}", _endpoint(server, server.models)),
        *(Route(f"{prefix}/{p}", _endpoint(server, h), methods=["POST"]) for p, h in plain.items()),
        *(Route(f"{prefix}/v1/{p}", _endpoint(server, h), methods=["POST"]) for p, h in posts.items()),
    ]


def _local(policy: Any) -> LocalPolicy:
    """Raises BadRequest for a model without weights and tokens of its own."""
    if not isinstance(policy, LocalPolicy):
        raise BadRequest("this model tells no tokens; only local weights do")
    return policy


def _has_key(request: Request, keys: Sequence[str]) -> bool:
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    given = request.headers.get("x-api-key") or bearer
    return any([hmac.compare_digest(given.encode(), key.encode()) for key in keys])


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
        "first": lambda at: written(events.first()),
        "text": lambda at, *given: written(events.text(*given)),
        "end": lambda at, answer: written(events.end(answer)),
    }


def _session(request: Request) -> str:
    return str(request.path_params.get("session") or request.headers.get(_SESSION_HEADER, ""))[:200]


def _host(request: Request) -> str:
    host = request.headers.get("host", "")
    return host if host.endswith("]") else host.rpartition(":")[0] or host


async def _gone(request: Request, here: threading.Event) -> None:
    """Wait until the client goes away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)
    here.clear()
