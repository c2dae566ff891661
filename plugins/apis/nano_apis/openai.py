"""OpenAI's chat completions: requests read, answers and chunks written.

Token fields have vLLM's names: `return_token_ids` in a request gives `prompt_token_ids` and, per choice,
`token_ids`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nano_apis.request import (
    AnswerWriter,
    Body,
    ClientCall,
    ClientMessage,
    Event,
    ModelAnswer,
    ModelRequest,
    TextDelta,
    flag,
    form_of,
    number,
    objects,
    role_of,
    sampling_of,
    text_of,
    tool_of,
)
from nano_coder.serve.access import BadRequest
from nano_shared.policy import DecodeIds
from nano_shared.types import Role, ToolSpec

ROLES = {
    "system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT,
    "tool": Role.TOOL, "function": Role.TOOL,
}  # fmt: skip
_UNREAD = {
    "function_call": "send tool_calls", "audio": "this model reads text", "prefix": "an answer begins anew",
    "partial": "an answer begins anew",
}  # fmt: skip
"""field of a message that the answer depends on -> what is"""
MOST_CHOICES = 64
MOST_TOP_LOGPROBS = 20
_NO_TOKENS = TextDelta()


def top_logprobs(body: Body) -> int:
    """Raises BadRequest for a number that is out of bounds."""
    count: int = number(body, "top_logprobs", int, 0, MOST_TOP_LOGPROBS, 0)
    return count


def read_chat(body: Body, longest: int) -> ModelRequest:
    """Raises BadRequest for what is malformed, and for what this server cannot do."""
    messages = objects(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages must be a list that is not empty", param="messages")
    tools = _tools(body)
    return ModelRequest(
        messages=tuple(_message(m, f"messages[{at}]") for at, m in enumerate(messages)),
        tools=tools,
        form=form_of(body.get("response_format"), body.get("tool_choice"), tools),
        top_logprobs=top_logprobs(body) if flag(body, "logprobs") else 0,
        sampling=sampling_of(body, longest, limits=("max_completion_tokens", "max_tokens")),
    )


def _tools(body: Body) -> tuple[ToolSpec, ...]:
    if body.get("tool_choice") in ("none", {"type": "none"}):
        return ()
    functions = [t for t in objects(body.get("tools"), "tools") if t.get("type", "function") == "function"]
    return tuple(tool_of(t.get("function"), where=f"tools[{at}].function") for at, t in enumerate(functions))


def _message(message: Body, where: str) -> ClientMessage:
    if unread := next((name for name in _UNREAD if message.get(name)), None):
        why = f"{where}.{unread} is not served: {_UNREAD[unread]}"
        raise BadRequest(why, param=f"{where}.{unread}")
    calls = objects(message.get("tool_calls"), f"{where}.tool_calls")
    return ClientMessage(
        role=role_of(message, ROLES, where),
        text=text_of(message.get("content"), where=where),
        calls=tuple(_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)),
        call_id=str(message["tool_call_id"]) if message.get("tool_call_id") else None,
    )


def _call(call: Body, where: str) -> ClientCall:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where} needs a function with a name and arguments", param=where)
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        raise BadRequest(f"{where}.function.arguments must be a text of JSON", param=where)
    return ClientCall(id=str(call.get("id", "")), name=function["name"], arguments=arguments)


def finish_reason(answer: ModelAnswer) -> str:
    if answer.completion.finish.is_cut:
        return "length"
    if answer.filtered:
        return "content_filter"
    return "tool_calls" if answer.calls else "stop"


def usage(answers: Sequence[ModelAnswer]) -> dict[str, int]:
    prompt, sampled = answers[0].prompt_tokens, sum(answer.sampled_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def token_cards(body: Body, tokens: TextDelta, decode: DecodeIds) -> list[dict[str, Any]]:
    """OpenAI's log-probs of these tokens, as chat completions and responses have them."""

    def token_card(token: int, logprob: float) -> dict[str, Any]:
        text = decode([token])
        name = f"token_id:{token}" if body.get("return_tokens_as_token_ids") else text
        return {"token": name, "logprob": logprob, "bytes": list(text.encode())}

    top = tokens.top or ((),) * len(tokens.ids)
    return [
        {**token_card(token, logprob), "top_logprobs": [token_card(*each) for each in likeliest]}
        for token, logprob, likeliest in zip(tokens.ids, tokens.logprobs, top, strict=True)
    ]


def _calls(calls: Sequence[ClientCall]) -> list[dict[str, Any]]:
    return [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in calls
    ]


def token_ids(body: Body, answer: ModelAnswer) -> dict[str, list[int]]:
    """What `return_token_ids` adds to an answer that has no choices."""
    tokens = answer.completion.tokens
    if tokens is None or not body.get("return_token_ids"):
        return {}
    return {"prompt_token_ids": list(answer.prompt_ids), "token_ids": list(tokens.sampled_ids)}


def fingerprint(answer: ModelAnswer) -> str:
    """The weights that sampled an answer, and their version."""
    return f"{answer.completion.policy_id}@{answer.completion.policy_version}"


def _token_fields(body: Body, tokens: TextDelta, decode: DecodeIds | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"logprobs": None}
    if tokens.ids and decode is not None and body.get("logprobs"):
        fields["logprobs"] = {"content": token_cards(body, tokens, decode), "refusal": None}
    if tokens.ids and body.get("return_token_ids"):
        fields["token_ids"] = list(tokens.ids)
    return fields


class ChatWriter(AnswerWriter):
    prefix = "chatcmpl-"

    def __init__(self, body: Body, model: str, decode: DecodeIds | None) -> None:
        super().__init__(body, model, decode)
        self._head = {"id": self._id, "created": int(time.time()), "model": self._model}
        self._ended: list[ModelAnswer] = []

    def whole(self, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            calls = {"tool_calls": _calls(answer.calls)} if answer.calls else {}
            text = answer.text or (None if answer.calls else "")
            message = {"role": "assistant", "content": text, **calls, "refusal": None}
            choice = {"index": index, "message": message, "finish_reason": finish_reason(answer)}
            choices.append(choice | _token_fields(self._body, answer.tokens_after(0), self._decode))
        return {
            **self._head, "object": "chat.completion", **self._weights(answers[0]),
            "choices": choices, "usage": usage(answers),
        }  # fmt: skip

    def first(self, at: int) -> Iterator[Event]:
        yield self._chunk(at, {"role": "assistant", "content": ""})

    def text(self, at: int, delta: TextDelta) -> Iterator[Event]:
        yield self._chunk(at, {"content": delta.text}, delta)

    def end(self, at: int, answer: ModelAnswer) -> Iterator[Event]:
        """What is left when the turn is complete: calls, tokens that were not sent, the reason."""
        if answer.calls:
            calls = [{"index": nth, **call} for nth, call in enumerate(_calls(answer.calls))]
            yield self._chunk(at, {"tool_calls": calls})
        name, last = self._chunk(at, {}, answer.tokens_after(self._told[at]), finish_reason(answer))
        yield name, {**(last or {}), **self._weights(answer)}
        self._ended.append(answer)

    def close(self) -> Iterator[Event]:
        if self._tells_usage:
            usage_chunk = {"object": "chat.completion.chunk", "choices": [], "usage": usage(self._ended)}
            yield "", self._head | usage_chunk
        yield "", None

    def _weights(self, answer: ModelAnswer) -> dict[str, Any]:
        shown = self._body.get("return_token_ids") and answer.prompt_ids
        ids = {"prompt_token_ids": list(answer.prompt_ids)} if shown else {}
        return {"system_fingerprint": fingerprint(answer), **ids}

    def _chunk(
        self, at: int, delta: dict[str, Any], tokens: TextDelta = _NO_TOKENS, finish: str | None = None
    ) -> Event:
        choice = {"index": at, "delta": delta, "finish_reason": finish}
        choice |= _token_fields(self._body, tokens, self._decode)
        self._told[at] += len(tokens.ids)
        told = {"usage": None} if self._tells_usage else {}
        return "", {**self._head, "object": "chat.completion.chunk", "choices": [choice], **told}
