"""JSON over HTTP: the body of a request, errors in each API's own shape, lines of server-sent events, and
connections that are closed where no whole head of a request comes in time."""

from __future__ import annotations

import asyncio
import json
import math
import resource
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.serve.api import APIS
from nano_coder.serve.request import BadRequest, RunEnded
from nano_coder.serve.served_models import status_behind
from nano_shared.errors import BudgetExhausted, ConfigError, ContextFull, NanoError, PolicyError, Refused
from nano_shared.extension_points import PLUGINS, missing_plugin
from nano_shared.printable import printable
from nano_shared.strict_json import decoded, json_object

_LEAST, _MOST = 4 << 20, 32 << 20
_MOST_READ = 4 * _MOST
_LARGE = 1 << 16
"""bytes of a body from which it is read beside the event loop"""
BODY_SECONDS = 60.0
"""for all of a request's body"""
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "api_error",
}  # fmt: skip
"""HTTP status -> OpenAI's type of an error"""
_CONTEXT_FULL = "This model's maximum context length is exceeded by the messages: "
"""by these words litellm knows a full context, which it does not retry"""


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
    if len(whole) < _LARGE:
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


async def refused(request: Request, problem: HTTPException) -> JSONResponse:
    """The answer where no route takes the path (404) or the method (405)."""
    asked = f"{request.method} {request.scope['path']}"
    if problem.status_code == 405:
        text = f"{asked} is not served; {problem.headers and problem.headers.get('Allow')} is"
    elif missing := [name for name in PLUGINS[APIS.group] if name in asked and name not in APIS]:
        text = str(missing_plugin(asked, PLUGINS[APIS.group][missing[0]]))
    else:
        text = f"{asked} is not served; see docs/serving.md"
    answer = error_response(request, BadRequest(text, status=problem.status_code))
    answer.headers.update(problem.headers or {})
    return answer


async def failed(request: Request, problem: Exception) -> JSONResponse:
    """The answer to a request at which this server failed; the traceback goes to its stderr alone."""
    return error_response(request, BadRequest("this server failed; its stderr says how", status=500))


ERROR_HANDLERS: Mapping[Any, Any] = {HTTPException: refused, Exception: failed}


def error_response(request: Request, problem: NanoError | BadRequest) -> JSONResponse:
    status, _ = status_of(problem)
    after = getattr(problem, "after", None)
    wait = 1 if after is None and status in (429, 503) else after
    headers = {} if wait is None else {"Retry-After": f"{math.ceil(wait)}"}
    if isinstance(problem, RunEnded):  # OpenAI's and Anthropic's SDKs obey it
        headers["X-Should-Retry"] = "false"
    if status in (408, 413):  # the rest of the body may not have been read
        headers["Connection"] = "close"
    return JSONResponse(error_shape(request)(problem), status_code=status, headers=headers)


def error_shape(request: Request) -> Callable[[NanoError | BadRequest], dict[str, Any]]:
    def of_openai(problem: NanoError | BadRequest) -> dict[str, Any]:
        param, code = (getattr(problem, name, None) for name in ("param", "code"))
        full, kind = "", status_of(problem)[1]
        if isinstance(problem, ContextFull):
            full, code = _CONTEXT_FULL, "context_length_exceeded"
        message = _sentence(f"{full}{problem}")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def of_api(problem: NanoError | BadRequest) -> dict[str, Any]:
        full = api.context_full if isinstance(problem, ContextFull) else ""
        return shape(_sentence(f"{full}{problem}"), *status_of(problem))

    for api in APIS.values():
        # not request.url, which a malformed Host header breaks
        if api.errors is not None and api.errors[0] in request.scope["path"]:
            shape = api.errors[1]
            return of_api
    return of_openai


def _sentence(text: str) -> str:
    return printable(text, 1000)


def status_of(problem: Exception) -> tuple[int, str]:
    """HTTP status and OpenAI's type of an error."""
    if isinstance(problem, BadRequest):
        return problem.status, _KINDS.get(problem.status, "invalid_request_error")
    if isinstance(problem, EndpointError):
        status = status_behind(problem)
        return status, _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if isinstance(problem, ConfigError):  # the key for the server behind
        return 502, "api_error"
    if isinstance(problem, RunEnded):  # what programs on litellm retry no more than the SDKs do: 401 and 404
        return 404, _KINDS[404]
    if isinstance(problem, BudgetExhausted):
        return 400, "invalid_request_error"
    return (503 if isinstance(problem, PolicyError) else 500), "api_error"


def data_line(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


HEAD_SECONDS = 20.0
"""from the connection, or the answer before, to the end of a request's headers"""


class BoundedConnection(H11Protocol):
    """uvicorn bounds only the idle time between requests: dripping bytes would hold a connection for ever.

    Where most of the files that this process may open are connections, the one that is idle longest goes.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4:
            idle = [each for each in self.connections if isinstance(each, BoundedConnection) and each.is_idle]
            min(idle, key=lambda each: each.idle_since).transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _await_request(self) -> None:
        self.idle_since = self.loop.time()
        self.loop.call_later(HEAD_SECONDS, self._close_unless_after, self.cycle)

    def _close_unless_after(self, before: object) -> None:
        if self.cycle is before:
            self.transport.close()
