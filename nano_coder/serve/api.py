"""APIs beside OpenAI's chat completions: what an extension of `nano.apis` is, and what it may use of the
server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.request import SHAPED, BadRequest
from nano_shared.extension_points import Extensions

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from nano_coder.serve.app import Server

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
