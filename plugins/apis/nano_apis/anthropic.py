"""Anthropic's messages: requests read, answers and events written.

`return_token_ids` is not Anthropic's: it adds `prompt_token_ids` and `token_ids` to the answer, in a stream
to the event `message_delta`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nano_apis.api import COUNTED, SAMPLED, ServedApi
from nano_apis.openai import token_ids
from nano_apis.request import (
    AnswerWriter,
    Body,
    ClientCall,
    ClientMessage,
    Event,
    ModelAnswer,
    ModelRequest,
    TextDelta,
    form_of,
    objects,
    role_of,
    sampling_of,
    split_at_stop,
    text_of,
    tool_of,
)
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.serve.access import BadRequest
from nano_shared.types import Role

if TYPE_CHECKING:
    from nano_apis.app import Server

ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


def read_messages(body: Body, longest: int) -> ModelRequest:
    """Raises BadRequest for what is malformed, and for what this server cannot do."""
    messages = objects(body.get("messages"), "messages")
    if not messages:
        raise BadRequest("messages must be a list that is not empty", param="messages")
    read: list[ClientMessage] = []
    if system := text_of(body.get("system"), where="system"):
        read.append(ClientMessage(role=Role.SYSTEM, text=system))
    for at, message in enumerate(messages):
        read += _message(message, f"messages[{at}]")
    if not read:
        raise BadRequest("messages hold no text, no call and no result", param="messages")
    tools = [tool for tool in objects(body.get("tools"), "tools") if "input_schema" in tool]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "none":
        tools = []
    offered = tuple(tool_of(tool, where=f"tools[{at}]") for at, tool in enumerate(tools))
    output = body.get("output_config")
    form = output.get("format") if isinstance(output, Mapping) else body.get("output_format")
    return ModelRequest(
        messages=tuple(read),
        tools=offered,
        form=form_of(form, choice, offered, param="output_config.format"),
        sampling=sampling_of(body, longest, limits=("max_tokens",)),
    )


def _message(message: Body, where: str) -> Iterator[ClientMessage]:
    role = role_of(message, ROLES, where)
    content = message.get("content")
    if not isinstance(content, list):
        yield ClientMessage(role=role, text=text_of(content, where=where))
        return
    texts: list[Any] = []
    calls: list[ClientCall] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "tool_use" and role is Role.ASSISTANT:
            arguments = json.dumps(part.get("input") or {}, ensure_ascii=False)
            calls.append(ClientCall(id=str(part.get("id")), name=str(part.get("name")), arguments=arguments))
        elif kind == "tool_result" and role is Role.USER:
            if texts:
                yield ClientMessage(role=Role.USER, text=text_of(texts, where=where))
                texts = []
            text = text_of(part.get("content"), where=f"{where}.content[{at}]")
            yield ClientMessage(role=Role.TOOL, text=text, call_id=str(part.get("tool_use_id")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(part)
    if texts or calls:
        yield ClientMessage(role=role, text=text_of(texts, where=where), calls=tuple(calls))


def _stop(answer: ModelAnswer) -> dict[str, str | None]:
    """Why the answer ended, and the stop sequence that ended it."""
    reason, sequence = "end_turn", split_at_stop(answer.completion)[1]
    if answer.completion.finish.is_cut:
        reason = "max_tokens"
    elif answer.filtered:
        reason = "refusal"
    elif answer.calls:
        reason = "tool_use"
    elif sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": reason, "stop_sequence": None}


def _content(answer: ModelAnswer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    uses = [
        {"type": "tool_use", "id": c.id.replace("call_", "toolu_"), "name": c.name, "input": c.values}
        for c in answer.calls
    ]
    return [*text, *uses]


class MessageWriter(AnswerWriter):
    prefix = "msg_"
    _open = False

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model,
            "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }  # fmt: skip

    def whole(self, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        (answer,) = answers
        ids = token_ids(self._body, answer)
        return {**self._head(), "content": _content(answer), **_stop(answer), "usage": _usage(answer), **ids}

    def first(self, at: int) -> Iterator[Event]:
        yield "message_start", {"type": "message_start", "message": self._head()}

    def text(self, at: int, delta: TextDelta) -> Iterator[Event]:
        if not self._open:
            self._open = True
            yield _start(0, {"type": "text", "text": ""})
        yield _delta(0, {"type": "text_delta", "text": delta.text})

    def end(self, at: int, answer: ModelAnswer) -> Iterator[Event]:
        if not self._open and answer.text:
            yield from self.text(at, TextDelta(answer.text))
        index = 0
        if self._open:
            yield "content_block_stop", {"type": "content_block_stop", "index": 0}
            index = 1
        for number, block in enumerate((b for b in _content(answer) if b["type"] == "tool_use"), index):
            yield _start(number, {**block, "input": {}})
            arguments = json.dumps(block["input"], ensure_ascii=False)
            yield _delta(number, {"type": "input_json_delta", "partial_json": arguments})
            yield "content_block_stop", {"type": "content_block_stop", "index": number}
        ended = {"type": "message_delta", "delta": _stop(answer), "usage": _usage(answer)}
        yield "message_delta", ended | token_ids(self._body, answer)
        yield "message_stop", {"type": "message_stop"}


def _usage(answer: ModelAnswer) -> dict[str, int]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens}


def _start(index: int, block: dict[str, Any]) -> Event:
    return "content_block_start", {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}


async def messages(server: Server, request: Request) -> Response:
    body = await server.body(request, API.fields["v1/messages"])
    model = await server.model_of(body)
    asked = await server.formed(read_messages, body, model)
    if asked.messages[-1].role is Role.ASSISTANT:  # to be continued, in this API
        raise BadRequest("messages end with the assistant's; an answer begins anew", param="messages")
    return await server.answered(request, [asked], model, MessageWriter(body, model.name, None))


async def count_tokens(server: Server, request: Request) -> Response:
    body = await server.body(request, _COUNTED)
    policy = (await server.model_of(body)).policy
    whole = {"max_tokens": 1, **body}
    asked = await asyncio.to_thread(read_messages, whole, policy.context_limit)
    if isinstance(policy, LocalPolicy):
        count = len(await asyncio.to_thread(server.conversations.rendered_ids, asked, policy, COUNTED))
    else:
        count = sum(policy.count(m.text) for m in asked.messages)
    return JSONResponse({"input_tokens": count})


def error(message: str, status: int, kind: str) -> dict[str, Any]:
    kind = "request_too_large" if status == 413 else kind
    return {"type": "error", "error": {"type": kind, "message": message}}


_COUNTED = frozenset({"model", "messages", "system", "tools", "tool_choice", "output_config"})
API = ServedApi(
    handlers={"v1/messages": messages, "v1/messages/count_tokens": count_tokens},
    fields={"v1/messages": SAMPLED | _COUNTED | {"max_tokens", "stop_sequences", "output_format"}},
    errors=("/messages", error),
    context_full="prompt is too long: ",
)
