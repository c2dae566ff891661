"""APIs beside OpenAI's chat completions: what an extension of `nano.apis` is, what it may use of the
server, and errors in each API's own shape."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nano_apis.request import SHAPED, RunEnded
from nano_apis.served_models import status_behind
from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.access import BadRequest
from nano_shared.errors import BudgetExhausted, ConfigError, ContextFull, NanoError, PolicyError
from nano_shared.extension_points import Extensions
from nano_shared.printable import printable

if TYPE_CHECKING:
    from nano_apis.app import Server

COUNTED = 4
"""contexts that are tokenised where only their tokens are wanted"""
SAMPLED = frozenset({
    "model", "stream", "return_token_ids", "stop", "temperature", "top_p", "top_k", "seed", *SHAPED,
})  # fmt: skip
"""fields of a request that say how is sampled"""
CHAT = frozenset({"messages", "tools", "tool_choice"})
CHAT_FIELDS = SAMPLED | CHAT | {
    "logprobs", "top_logprobs", "return_tokens_as_token_ids", "max_tokens", "max_completion_tokens",
    "response_format", "n", "stream_options",
}  # fmt: skip


ErrorShape = Callable[[str, int, str], dict[str, Any]]
"""message, HTTP status and OpenAI's type of an error -> the body of the answer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApi:
    """Routes of an API: each is served at its path, and for a named session at /sessions/NAME/PATH."""

    handlers: Mapping[str, Callable[[Server, Request], Awaitable[Response]]]
    """path -> what answers a POST, given the `Server` and the request"""
    fields: Mapping[str, Collection[str]] = field(default_factory=dict)
    """path -> the fields that a request may hold"""
    errors: tuple[str, ErrorShape] | None = None
    """part of the paths whose errors have another shape than OpenAI's, and that shape"""
    context_full: str = ""
    """words by which its clients know a full context, before the sentence"""


APIS: Extensions[ServedApi] = Extensions("nano.apis", ServedApi)


def local(policy: Any) -> LocalPolicy:
    """Raises BadRequest for a model without weights and tokens of its own."""
    if not isinstance(policy, LocalPolicy):
        raise BadRequest("this model has no tokens of its own; only local weights have")
    return policy


# ------------------------------------------------------------------------------------ errors

_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
    500: "api_error",
}  # fmt: skip
"""HTTP status -> OpenAI's type of an error"""
_CONTEXT_FULL = "This model's maximum context length is exceeded by the messages: "
"""by these words litellm knows a full context, which it does not retry"""


async def refused(request: Request, problem: HTTPException) -> JSONResponse:
    """The answer where no route takes the path (404) or the method (405)."""
    asked = f"{request.method} {request.scope['path']}"
    if problem.status_code == 405:
        text = f"{asked} is not served; {problem.headers and problem.headers.get('Allow')} is"
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
