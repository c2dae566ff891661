"""OpenAI's chat completions: requests read, answers and chunks written.

Token fields have vLLM's names: `return_token_ids` in a request gives `prompt_token_ids` and, per choice,
`token_ids`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nano_coder.serve.request import (
    BadRequest,
    Body,
    ClientCall,
    ClientMessage,
    ModelAnswer,
    ModelRequest,
    TextDelta,
    form_of,
    number,
    objects,
    role_of,
    sampling_of,
    text_of,
    tool_of,
)
from nano_shared.policy import DecodeIds
from nano_shared.types import Role, ToolSpec

ROLES = {
    "system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT,
    "tool": Role.TOOL, "function": Role.TOOL,
}  # fmt: skip
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
        top_logprobs=top_logprobs(body) if body.get("logprobs") else 0,
        sampling=sampling_of(body, longest, limits=("max_completion_tokens", "max_tokens")),
    )


def _tools(body: Body) -> tuple[ToolSpec, ...]:
    if body.get("tool_choice") == "none":
        return ()
    functions = [t for t in objects(body.get("tools"), "tools") if t.get("type", "function") == "function"]
    return tuple(tool_of(t.get("function"), where=f"tools[{at}].function") for at, t in enumerate(functions))


def _message(message: Body, where: str) -> ClientMessage:
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


# ------------------------------------------------------------------------------------------- answers


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


def chat_answer(
    body: Body, answers: Sequence[ModelAnswer], model: str, decode: DecodeIds | None, id: str
) -> dict[str, Any]:
    """The body of a chat completion that is not streamed."""
    choices = []
    for index, answer in enumerate(answers):
        calls = {"tool_calls": _calls(answer.calls)} if answer.calls else {}
        message = {"role": "assistant", "content": answer.text or (None if answer.calls else ""), **calls}
        choice = {
            "index": index,
            "message": {**message, "refusal": None},
            "finish_reason": finish_reason(answer),
        }
        choices.append(choice | _token_fields(body, answer.tokens_after(0), decode))
    answered: dict[str, Any] = {
        "id": id, "object": "chat.completion", "created": int(time.time()),
        "model": str(body.get("model") or model),
        "system_fingerprint": fingerprint(answers[0]),
    }  # fmt: skip
    if body.get("return_token_ids") and answers[0].prompt_ids:
        answered["prompt_token_ids"] = list(answers[0].prompt_ids)
    return {**answered, "choices": choices, "usage": usage(answers)}


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


class ChatChunks:
    """The chunks of one choice of a streamed chat completion."""

    def __init__(self, body: Body, model: str, decode: DecodeIds | None, id: str, index: int) -> None:
        self._body, self._decode, self._index = body, decode, index
        self.answer: ModelAnswer | None = None
        self._head = {
            "id": id, "object": "chat.completion.chunk", "created": int(time.time()),
            "model": str(body.get("model") or model),
        }  # fmt: skip
        options = body.get("stream_options")
        self._usage = bool(isinstance(options, Mapping) and options.get("include_usage"))
        self._told_ids = 0

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def text(self, delta: TextDelta) -> dict[str, Any]:
        return self._chunk({"content": delta.text}, delta)

    def end(self, answer: ModelAnswer) -> Iterator[dict[str, Any]]:
        """What is left when the turn is complete: calls, tokens that were not sent, the reason."""
        if answer.calls:
            calls = [{"index": at, **call} for at, call in enumerate(_calls(answer.calls))]
            yield self._chunk({"tool_calls": calls})
        last = self._chunk({}, answer.tokens_after(self._told_ids), finish_reason(answer))
        last["system_fingerprint"] = fingerprint(answer)
        if self._body.get("return_token_ids") and answer.prompt_ids:
            last["prompt_token_ids"] = list(answer.prompt_ids)
        yield last
        self.answer = answer

    def closing(self, answers: Sequence[ModelAnswer]) -> Iterator[dict[str, Any]]:
        """The chunk with the usage, if the client wants it."""
        if self._usage:
            yield {**self._head, "choices": [], "usage": usage(answers)}

    def _chunk(
        self, delta: dict[str, Any], tokens: TextDelta = _NO_TOKENS, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, "finish_reason": finish}
        choice |= _token_fields(self._body, tokens, self._decode)
        self._told_ids += len(tokens.ids)
        return {**self._head, "choices": [choice], **({"usage": None} if self._usage else {})}


def closing_chunks(chunks: Sequence[ChatChunks]) -> Iterator[dict[str, Any]]:
    """The last chunks of an answer, after those of every choice."""
    return chunks[0].closing([each.answer for each in chunks if each.answer is not None])
