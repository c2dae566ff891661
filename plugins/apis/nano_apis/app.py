"""The application: routes, keys, bodies of requests, and a handler of each API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from nano_apis import openai
from nano_apis.api import APIS, CHAT_FIELDS, ERROR_HANDLERS, error_response, local
from nano_apis.conversations import Conversations, UnknownSession
from nano_apis.generation import Client, ClientGone, Generation, ServerLimits, ServerMetrics
from nano_apis.request import (
    SHAPED,
    AnswerWriter,
    ModelRequest,
    check_fields,
    check_shaping,
    flag,
    grammar_of,
    number,
)
from nano_apis.served_models import Adapters, Promoted, ServedModel, ServedModels, passed_on
from nano_coder.agent.dialects.dialect import DIALECTS
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.access import RIGHTS, Access, Action, BadRequest
from nano_coder.serve.given_reward import MOST_COMPONENTS, MOST_REWARD
from nano_shared.errors import NanoError, Refused, UsageError
from nano_shared.process import return_freed_memory
from nano_shared.strict_json import decoded, json_object

if TYPE_CHECKING:
    from nano_coder.models.local.engine import TokenScore

_PASSED_ON = {"response_format": None, "tool_choice": None}
"""what the server behind reads itself"""
_SWEEP_SECONDS = 2.0
_ANY_CONTEXT = 1 << 20
_LARGE = 1 << 20
"""bytes of a request after which freed memory is returned: the allocator keeps it"""


class Server:
    def __init__(
        self,
        conversations: Conversations,
        *,
        access: Access | None = None,
        limits: ServerLimits | None = None,
        promoted: Promoted | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._limits = limits or ServerLimits()
        self.conversations = conversations
        self._models = ServedModels(conversations, adapters, promoted)
        self._metrics = ServerMetrics(conversations.model.name)
        self._generation = Generation(conversations, self._metrics, self._limits)
        self._access = access or Access()

    # ------------------------------------------------------------------------------------- models

    async def model_of(self, body: Mapping[str, Any]) -> ServedModel:
        """The model that a request names."""
        return await asyncio.to_thread(self._models.find, body.get("model"))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        for model in self._models.opened():
            self._metrics.read_cache(model.name, model.policy)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        cards = await asyncio.to_thread(self._models.cards)
        wanted = request.path_params.get("model")
        if wanted is None:
            return JSONResponse({"object": "list", "data": cards, "models": cards})
        card = next((card for card in cards if card["id"] == wanted), None)
        if card is None:
            there = f"no model {wanted!r:.100}; there is {self._models.current.name}"
            raise BadRequest(there, status=404, code="model_not_found")
        return JSONResponse(card)

    async def load_adapter(self, request: Request) -> Response:
        name = await asyncio.to_thread(self._models.load_adapter, await self._read(request))
        return JSONResponse({"loaded": name})

    async def unload_adapter(self, request: Request) -> Response:
        name = await asyncio.to_thread(self._models.unload_adapter, await self._read(request))
        return JSONResponse({"unloaded": name})

    async def _read(self, request: Request) -> Mapping[str, Any]:
        context = self.conversations.model.policy.context_limit
        # that a rollout's history is too long is an end of its run, which is told further in
        return await read_body(request, _ANY_CONTEXT if self.conversations.is_rollout else context)

    async def body(self, request: Request, known: Collection[str]) -> Mapping[str, Any]:
        """The body of a request that may hold the `known` fields, which are looked at unless the sampling is
        a rollout's. Raises BadRequest."""
        body = await self._read(request)
        if not self.conversations.is_rollout:
            check_fields(known, body, frozenset(self._ends()))
        return body

    def _ends(self) -> Collection[int]:
        """Tokens at which the policy's turns end whatever a request says; empty for a hosted policy."""
        policy = self.conversations.model.policy
        return policy.engine.eos_ids if isinstance(policy, LocalPolicy) else ()

    # --------------------------------------------------------------------------------------- APIs

    async def answered(
        self, request: Request, asked: Sequence[ModelRequest], model: ServedModel, writer: AnswerWriter
    ) -> Response:
        """The model's answers, as the writer writes them."""
        if writer.streams:
            return await self._generation.stream(request, asked, model, writer)
        return JSONResponse(writer.whole(await self._generation.answers(request, asked, model)))

    async def scores(
        self, request: Request, asked: Sequence[ModelRequest], top: int | None, model: ServedModel, *,
        log: bool = True,
    ) -> list[list[TokenScore]]:  # fmt: skip
        """Of each prompt: the log-probs of its tokens after the first, with those of the `top` likeliest."""
        policy, client = local(model.policy), Client.of(request)
        if self.conversations.is_rollout:  # the module may be in training elsewhere
            raise BadRequest("prompts are not scored in a rollout", param="prompt")
        if any(len(each.prompt_ids) > policy.context_limit for each in asked):
            raise BadRequest(f"a prompt is longer than {policy.context_limit} tokens", param="prompt")

        def score(each: ModelRequest) -> list[TokenScore]:
            if log:
                self.conversations.log_scored(each, client.session, model)
            return policy.score(each.prompt_ids, top or 0)

        def scores() -> list[list[TokenScore]]:
            return [score(each) for each in asked]

        (found,) = await self._generation.in_threads(request, client, [scores])
        return found

    async def chat(self, request: Request) -> Response:
        body = await self._read(request)
        model = await self.model_of(body)
        if model.upstream:  # it answers for what it is passed
            asked = await asyncio.to_thread(
                openai.read_chat, {**body, **_PASSED_ON}, model.policy.context_limit
            )
            asked = replace(asked, more=passed_on(body))
        else:
            if not self.conversations.is_rollout:
                check_fields(CHAT_FIELDS, body)
            asked = await self.formed(openai.read_chat, body, model)
        choices = number(body, "n", int, 1, openai.MOST_CHOICES, 1)
        requests = [asked.seeded(index) for index in range(choices)]
        writer = openai.ChatWriter(body, model.name, getattr(model.policy, "decode", None))
        return await self.answered(request, requests, model, writer)

    async def session(self, request: Request) -> Response:
        session = request.path_params["session"]
        try:
            runs = await asyncio.to_thread(self.conversations.runs, session, self._owner(request))
            return JSONResponse({"session": session, "runs": runs})
        except UnknownSession:
            raise BadRequest(f"no conversation in session {session!r:.100}", status=404) from None

    async def reward(self, request: Request) -> Response:
        body, session = await self._read(request), request.path_params["session"]
        value, components = _read_reward(body)
        give, replace = self.conversations.reward, flag(body, "replace")
        if replace:
            self._access.check(request, Action.REPLACE)
        owner = self._owner(request)
        try:
            runs = await asyncio.to_thread(give, session, value, components, replace=replace, owner=owner)
        except UnknownSession:
            raise BadRequest(f"no conversation in session {session!r:.100}", status=404) from None
        except UsageError as problem:
            raise BadRequest(str(problem), status=409, param="replace") from None
        return JSONResponse({"session": session, "runs": runs, "reward": value})

    async def formed(
        self, read: Callable[[Mapping[str, Any], int], ModelRequest], body: Mapping[str, Any],
        model: ServedModel,
    ) -> ModelRequest:  # fmt: skip
        """The request with the grammar that forces its form. Raises BadRequest where none can, and as
        `read`."""
        asked = await asyncio.to_thread(read, body, model.policy.context_limit)
        form, policy = asked.form, model.policy
        if model.upstream:  # shall do it to the logits
            asked = replace(asked, more={name: body[name] for name in SHAPED if body.get(name) is not None})
        else:
            check_shaping(asked.sampling, policy, formed=not form.any)
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
                from nano_coder.models.local.sampler import MISSING

                raise BadRequest(f"{param}: {MISSING}", status=501, param=param) from None
            except (UsageError, ValueError) as problem:
                raise BadRequest(f"{param} cannot be constrained: {problem}", param=param) from None
            return grammar

        sampling = asked.sampling.model_copy(update={"grammar": await asyncio.to_thread(compiled)})
        return replace(asked, sampling=sampling)

    # ------------------------------------------------------------------------------- keys and life

    def authorise(self, request: Request, action: Action) -> None:
        self._access.check(request, action)
        request.state.owner = self._access.owner(request)

    def _owner(self, request: Request) -> str | None:
        """Whose sessions this caller may read and reward; None: everybody's."""
        anybody = self._access.caller(request) in RIGHTS[Action.ANY_SESSION]
        return None if anybody else str(request.state.owner)

    def start(self) -> None:
        self._models.start_engine(self._models.current.policy)

    def stop(self) -> None:
        self._generation.close()
        self._models.stop()
        self.conversations.end_all()

    async def sweep(self) -> None:
        """Follow promotions, end idle conversations, and return memory that is idle, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            await asyncio.to_thread(self._models.follow)
            await asyncio.to_thread(self.conversations.end_idle, self._limits.idle_seconds)
            if self._generation.rests():
                await asyncio.to_thread(return_freed_memory, 0)


def serve_app(
    conversations: Conversations,
    *,
    access: Access | None = None,
    limits: ServerLimits | None = None,
    promoted: Promoted | None = None,
    adapters: Adapters | None = None,
    pages: Mapping[str, ASGIApp] | None = None,
) -> Starlette:
    """The application over these conversations, and further pages by path, which check their own keys.
    `promoted` is asked every two seconds."""
    server = Server(
        conversations, access=access, limits=limits, promoted=promoted, adapters=adapters
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.start()
        sweeping = asyncio.ensure_future(server.sweep())
        yield
        sweeping.cancel()
        await asyncio.to_thread(server.stop)

    routes: list[Route | Mount] = [
        Route("/health", _endpoint(server, server.health, Action.HEALTH)),
        Route("/metrics", _endpoint(server, server.metrics, Action.METRICS)),
    ]
    routes += [*_apis(server, ""), *_apis(server, "/sessions/{session}")]
    routes += [
        Route(f"/v1/{name}_lora_adapter", _endpoint(server, handler, Action.LOAD), methods=["POST"])
        for name, handler in (("load", server.load_adapter), ("unload", server.unload_adapter))
    ]
    routes += [
        Route("/sessions/{session}", _endpoint(server, server.session)),
        Route("/sessions/{session}/reward", _endpoint(server, server.reward), methods=["POST"]),
    ]
    mounts = [Mount(f"/{name}", page) for name, page in (pages or {}).items()]
    return Starlette(routes=[*routes, *mounts], exception_handlers=ERROR_HANDLERS, lifespan=lifespan)


def episode_app(conversations: Conversations) -> Starlette:
    """The application of one foreign agent: the APIs alone, so that it cannot reward itself."""
    return Starlette(routes=_apis(Server(conversations), ""), exception_handlers=ERROR_HANDLERS)


def _apis(server: Server, prefix: str) -> list[Route]:
    further = {path: handler for api in APIS.values() for path, handler in api.handlers.items()}
    return [
        Route(f"{prefix}/v1/models", _endpoint(server, server.models)),
        Route(f"{prefix}/v1/models/{{model:path}}", _endpoint(server, server.models)),
        Route(f"{prefix}/v1/chat/completions", _endpoint(server, server.chat), methods=["POST"]),
        *(
            Route(f"{prefix}/{p}", _endpoint(server, partial(h, server)), methods=["POST"])
            for p, h in further.items()
        ),
    ]


def _read_reward(body: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    value = number(body, "reward", float, -MOST_REWARD, MOST_REWARD, None)
    if value is None:
        raise BadRequest('reward is missing; send {"reward": 1}', param="reward")
    given = body.get("components") or {}
    if not isinstance(given, Mapping) or len(given) > MOST_COMPONENTS or any(len(n) > 100 for n in given):
        raise BadRequest(
            f"components must be at most {MOST_COMPONENTS} numbers by names of 100 characters",
            param="components",
        )
    numbers = {n: number(given, n, float, -MOST_REWARD, MOST_REWARD, None) for n in given}
    if None in numbers.values():
        raise BadRequest("components must be numbers, and null is none", param="components")
    return value, numbers


def _endpoint(server: Server, handler: Any, action: Action = Action.INFER) -> Any:
    async def endpoint(request: Request) -> Response:
        try:
            server.authorise(request, action)
            response: Response = await handler(request)
        except (NanoError, BadRequest) as problem:
            response = error_response(request, problem)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=499)
        if getattr(request.state, "size", 0) > _LARGE:
            response.background = BackgroundTask(return_freed_memory, 0)
        return response

    return endpoint


# --------------------------------------------------------------------------------------- bodies

_LEAST, _MOST = 4 << 20, 32 << 20
_MOST_READ = 4 * _MOST
_LONG = 1 << 16
"""bytes of a body from which it is read beside the event loop"""
BODY_SECONDS = 60.0
"""for all of a request's body"""


def largest_body(context: int) -> int:
    """Bytes of a request that a model of this context may get: 64 for each token and 1 MiB, from 4 to 32."""
    return min(max(64 * context + (1 << 20), _LEAST), _MOST)


async def read_body(request: Request, context: int) -> Mapping[str, Any]:
    """The JSON object of a request to a model of this context. Raises BadRequest for anything else."""
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        why = f"Content-Encoding {coding!r:.60} is not read; send the body as it is"
        raise BadRequest(why, status=415)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            whole = await _bytes(request, largest_body(context))
    except TimeoutError:
        raise BadRequest(f"the request was not whole after {BODY_SECONDS:g} s", status=408) from None
    values, most = sum(map(whole.count, (b",", b"[", b"{"))), 4 * context + (1 << 18)
    if values > most:  # parsed at once, during which nobody else is answered
        raise BadRequest(f"the request holds {values} values; {most} are the most", status=413)
    if len(whole) < _LONG:
        return _parsed(whole)
    return await asyncio.to_thread(_parsed, whole)


def _parsed(whole: bytes) -> Mapping[str, Any]:
    try:
        body: Mapping[str, Any] = _plain(json_object(decoded(whole)))
    except Refused as problem:
        name = "the request" if problem.field == "row" else repr(problem.field)[:100]
        raise BadRequest(f"{name} {problem.why}") from None
    return body


async def _bytes(request: Request, most: int) -> bytes:
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        parts.append(part)
        if size > most:  # read on, since a client that is cut off while it sends loses the answer
            parts.clear()
        if size > _MOST_READ:
            break
    request.state.size = size
    if size > most:
        raise BadRequest(f"the request is longer than {most >> 20} MiB", status=413)
    return b"".join(parts)


def _plain(value: Any) -> Any:
    """JSON without halves of surrogate pairs, which nothing can encode."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    return value
