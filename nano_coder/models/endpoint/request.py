"""The request to an endpoint: messages in the order that the API demands, and parameters that it takes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nano_coder.agent.dialects.api import Api
from nano_coder.agent.dialects.dialect import function_schema
from nano_coder.models.endpoint.exchange import RefusedRequest
from nano_coder.models.endpoint.model_card import ModelCard
from nano_shared.errors import ContextFull
from nano_shared.policy import Conversation
from nano_shared.types import ApiAnswer, ApiCall, Message, Role, Sampling

_LENGTHS = ("max_completion_tokens", "max_tokens")
"""names of the limit of an answer: the API's own, and that of servers which still know the old one alone"""
UNSHAPED = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""parameters that leave the policy's distribution as it is. vLLM takes those that a request lacks from the
model's generation_config.json, and its log-probs do not show them"""
_OPTIONAL = ("temperature", "seed", "stop", "stream_options", "stream", "return_token_ids", "logprobs",
             *UNSHAPED)  # fmt: skip
_WITH_TOKENS = {"return_token_ids": True, "logprobs": True, "temperature": 1.0, **UNSHAPED}
"""asked for with tokens"""
_FULL = re.compile(
    r"context.{0,20}(length|window|size|limit)|context_length_exceeded|exceed_context|prompt is too long"
    r"|too many (input |prompt )?tokens",
    re.IGNORECASE,
)
_NUMBER = r"(\d[\d,]*)"
_CONTEXT = re.compile(
    rf"(?:context (?:length|window|size)\D{{0,30}}|n_ctx\D{{0,12}}){_NUMBER}", re.IGNORECASE
)
_PROMPT = re.compile(rf"{_NUMBER} (?:input tokens|in the messages|tokens in the prompt)", re.IGNORECASE)
_MOST = re.compile(rf"at most {_NUMBER} (?:completion|output) tokens", re.IGNORECASE)


@dataclass(slots=True)
class Accepted:
    """Parameters that a server accepts for a model, as learnt from its refusals in this process."""

    length: str = _LENGTHS[0]
    """name of the limit of an answer"""
    most: int | None = None
    """longest answer that may be asked for"""
    context: int | None = None
    """context in tokens, where a refusal named it"""
    refused: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, refusal: RefusedRequest, body: dict[str, Any]) -> str | None:
        """Change the request so that it avoids a refusal. Returns a message for the user, empty if it was
        known before; None if no change avoids it.

        Raises ContextFull where the messages do not fit the model's context.
        """
        said, named = refusal.message, refusal.error.get("param")
        with self.lock:
            if _FULL.search(f"{refusal.error.get('code')} {said}"):
                return self._shorten(said, body)
            if most := _MOST.search(said):
                number = int(most[1].replace(",", ""))
                if 0 < number < body.get(self.length, 0):
                    self.most = body[self.length] = number
                    return f"answers of {number} tokens, the most that it gives"
            for name in dict.fromkeys((named, *_mentioned(said, body))):
                if name not in body or name not in (*_LENGTHS, *_OPTIONAL):
                    continue
                known = name in self.refused  # by another call, meanwhile
                self.refused |= {name, "stream_options"} if name == "stream" else {name}
                value, instead = body.pop(name), ""
                if name in _LENGTHS:
                    self.length = next((n for n in _LENGTHS if n not in self.refused), "")
                    body |= {self.length: value} if self.length else {}
                    instead = f", with {self.length}" if self.length else ""
                if name == "stream":
                    body.pop("stream_options", None)
                return "" if known else f"without {name}{instead}"
        return None

    def _shorten(self, said: str, body: dict[str, Any]) -> str | None:
        """Reduce the answer's length to the room in the context. Raises ContextFull if there is none."""
        context, prompt = _CONTEXT.search(said), _PROMPT.search(said)
        if context:
            self.context = int(context[1].replace(",", "")) or None
        if context and prompt and self.length in body:
            room = int(context[1].replace(",", "")) - int(prompt[1].replace(",", ""))
            if 0 < room < body[self.length]:
                body[self.length] = room
                return ""
        raise ContextFull(f"the messages do not fit the context of the model: {said[:300]}")


@cache
def accepted_by(url: str, model: str) -> Accepted:
    """The parameters known in this process to be accepted for a server's model."""
    return Accepted()


def _mentioned(said: str, body: dict[str, Any]) -> Iterator[str]:
    """Parameters of the request that a sentence names."""
    for name in (*_LENGTHS, *_OPTIONAL):
        if name in body and re.search(rf"(?<![A-Za-z_]){name}(?![A-Za-z_])", said):
            yield name


def request_body(
    model: str,
    conversation: Conversation,
    sampling: Sampling,
    accepted: Accepted,
    *,
    temperature: bool,
    card: ModelCard,
) -> dict[str, Any]:
    """The request, without parameters that are not set or that the server refused."""
    most = min(sampling.max_tokens, accepted.most or sampling.max_tokens)
    optional: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": sampling.temperature if temperature else None,
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k or None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }
    if card.gives_tokens:
        optional |= _WITH_TOKENS | {n: v for n, v in optional.items() if v is not None}
    taken = {n: v for n, v in optional.items() if v is not None and n not in accepted.refused}
    tools = [function_schema(tool) for tool in conversation.tools]
    return {
        "model": model,
        "messages": _messages(conversation, card),
        **({"tools": tools} if tools else {}),
        **({accepted.length: most} if accepted.length else {}),
        **taken,
    }


def add_parameters(body: dict[str, Any], more: Mapping[str, Any], card: ModelCard) -> None:
    """Add parameters to a request; None leaves one out, but for those that tokens need."""
    for name, value in more.items():
        if value is not None:
            body[name] = value
        elif not (card.gives_tokens and name in _WITH_TOKENS):
            body.pop(name, None)


_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "logit_bias": {},
    "response_format": {"type": "text"},
}  # fmt: skip


def shaping(body: Mapping[str, Any]) -> list[str]:
    """Parameters of a request under which a server does not sample from the policy's own distribution."""
    return [name for name, neutral in _NEUTRAL.items() if body.get(name) not in (None, neutral)]


def _messages(conversation: Conversation, card: ModelCard) -> list[dict[str, Any]]:
    if not card.profile:
        return list(_joined(map(wire_message, conversation.messages)))
    # the policy's own template renders them: roles as they are
    return [{**wire_message(message), "role": message.role.value} for message in conversation.messages]


def wire_message(message: Message) -> dict[str, Any]:
    if message.role is Role.TOOL and message.call_id is not None:
        return {"role": "tool", "tool_call_id": message.call_id, "content": message.content}
    if message.calls:
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _wire_arguments(c)}}
            for c in message.calls
        ]
        return {"role": "assistant", "content": message.content or None, "tool_calls": calls}
    # many servers reject the role `tool` without the id of a call that they parsed themselves
    role = Role.USER if message.role is Role.TOOL else message.role
    return {"role": role.value, "content": message.content}


def _joined(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The messages, neighbours of the user as one: some templates want roles to alternate."""
    last: dict[str, Any] | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "user":
            last = {**last, "content": f"{last['content']}\n\n{message['content']}"}
            continue
        if last is not None:
            yield last
        last = message
    if last is not None:
        yield last


def _wire_arguments(call: ApiCall) -> str:
    """Arguments as a JSON object, which some servers demand of history too."""
    parsed = Api().parse_api("", ApiAnswer(calls=(call,)), ())
    if parsed.error is not None:
        return json.dumps({"malformed": call.arguments})
    return json.dumps(parsed.calls[0].arguments) if parsed.repairs else call.arguments or "{}"
