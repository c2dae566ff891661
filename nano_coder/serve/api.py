"""APIs beside OpenAI's chat completions: what an extension of `nano.apis` is, and what it may use of the
server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.request import SHAPED, AnswerWriter, BadRequest, Body, ModelRequest
from nano_shared.extensions import Extensions

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from nano_coder.models.local.engine import TokenScore
    from nano_coder.serve.conversations import Conversations
    from nano_coder.serve.served_model import ServedModel

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


class ApiServer(Protocol):
    """What an API uses of the server."""

    conversations: Conversations

    async def body(self, request: Request, known: Collection[str]) -> Body:
        """The body of a request that may hold the `known` fields. Raises BadRequest."""

    async def model_of(self, body: Body) -> ServedModel:
        """The model that a request names."""

    async def formed(
        self, read: Callable[[Body, int], ModelRequest], body: Body, model: ServedModel
    ) -> ModelRequest:
        """What `read` makes of a body and the model's context, with the grammar that forces its form."""

    async def answered(
        self, request: Request, asked: Sequence[ModelRequest], model: ServedModel, writer: AnswerWriter
    ) -> Response:
        """The model's answers, as the writer writes them."""

    async def scores(
        self, request: Request, asked: Sequence[ModelRequest], top: int | None, model: ServedModel, *,
        log: bool = True,
    ) -> list[list[TokenScore]]:  # fmt: skip
        """Of each prompt: the log-probs of its tokens after the first, with those of the `top` likeliest."""


ErrorShape = Callable[[str, int, str], dict[str, Any]]
"""message, HTTP status and OpenAI's type of an error -> the body of the answer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedApi:
    """Routes of an API: each is served at its path, and for a named session at /sessions/NAME/PATH."""

    handlers: Mapping[str, Callable[[Any, Request], Awaitable[Response]]]
    """path -> what answers a POST, given a `ApiServer` and the request"""
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
