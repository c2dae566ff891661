"""OpenAI's responses: requests read, answers and events written. Nothing is stored: `store` is ignored.

Tool types that only OpenAI can run are left out of what the model sees, and the request is served without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from nano_apis.api import SAMPLED, ServedApi
from nano_apis.openai import token_cards, token_ids, top_logprobs
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
    text_of,
    tool_of,
)
from nano_coder.serve.access import BadRequest
from nano_shared.types import Role

if TYPE_CHECKING:
    from nano_apis.app import Server

_LOGPROBS = "message.output_text.logprobs"
ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


def read_response(body: Body, longest: int) -> ModelRequest:
    """Raises BadRequest for what is malformed, and for what this server cannot do."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise BadRequest("input must be a text or a list of items", param="input")
    items = objects(items, "input")
    read: list[ClientMessage] = []
    if instructions := text_of(body.get("instructions"), where="instructions"):
        read.append(ClientMessage(role=Role.SYSTEM, text=instructions))
    for at, item in enumerate(items):
        _add(read, item, f"input[{at}]")
    if not read:
        raise BadRequest("input must not be empty", param="input")
    tools = [tool for tool in objects(body.get("tools"), "tools") if tool.get("type") == "function"]
    if body.get("tool_choice") in ("none", {"type": "none"}):
        tools = []
    offered = tuple(tool_of(tool, where=f"tools[{at}]") for at, tool in enumerate(tools))
    include = body.get("include") or []
    if not isinstance(include, list):
        raise BadRequest("include must be a list of texts", param="include")
    text = body.get("text") or {}
    if not isinstance(text, Mapping):
        raise BadRequest("text must be an object", param="text")
    return ModelRequest(
        messages=tuple(read),
        tools=offered,
        form=form_of(text.get("format"), body.get("tool_choice"), offered, param="text.format"),
        top_logprobs=top_logprobs(body) if _LOGPROBS in include else 0,
        sampling=sampling_of(body, longest, limits=("max_output_tokens",)),
    )


def _add(read: list[ClientMessage], item: Body, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = role_of(item, ROLES, where)
            message = ClientMessage(role=role, text=text_of(item.get("content"), where=where))
            _join(read, message)
        case "function_call" | "custom_tool_call":
            arguments = item.get("arguments", item.get("input", "{}"))
            call = ClientCall(
                id=str(item.get("call_id")), name=str(item.get("name")), arguments=str(arguments)
            )
            _join(read, ClientMessage(role=Role.ASSISTANT, text="", calls=(call,)))
        case "function_call_output" | "custom_tool_call_output":
            text = text_of(item.get("output"), where=where)
            read.append(ClientMessage(role=Role.TOOL, text=text, call_id=str(item.get("call_id"))))
        case "item_reference":
            raise BadRequest(f"{where}: no item is stored here; send the whole item", param=where)
        case _:
            pass  # reasoning, and items of tools that only OpenAI runs


def _join(read: list[ClientMessage], message: ClientMessage) -> None:
    """One turn of the assistant is several items: its text and each of its calls."""
    last = read[-1] if read else None
    if last and last.role is Role.ASSISTANT and message.role is Role.ASSISTANT and message.calls:
        read[-1] = ClientMessage(role=last.role, text=last.text, calls=(*last.calls, *message.calls))
    else:
        read.append(message)


def _cut(answer: ModelAnswer) -> str | None:
    if answer.completion.finish.is_cut:
        return "max_output_tokens"
    return "content_filter" if answer.filtered else None


def _shown_tool(tool: Body) -> Body:
    """A tool of the request as an answer shows it: functions with all their fields."""
    absent = {"description": None, "parameters": None, "strict": None}
    return {**absent, **tool} if tool.get("type") == "function" else tool


def _or_one(value: float | None) -> float:
    return 1.0 if value is None else value


def _message(id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class ResponseWriter(AnswerWriter):
    prefix = "resp_"
    _number = -1
    _open = False

    def whole(self, answers: Sequence[ModelAnswer]) -> dict[str, Any]:
        (answer,) = answers
        cut = _cut(answer)
        return self._head("incomplete" if cut else "completed") | {
            "output": self._items(answer),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": cut} if cut else None,
            "usage": {
                "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.sampled_tokens, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
            },
            **token_ids(self._body, answer),
        }  # fmt: skip

    def first(self, at: int) -> Iterator[Event]:
        started = self._head("in_progress")
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def text(self, at: int, delta: TextDelta) -> Iterator[Event]:
        place = {"item_id": f"{self._id}-message", "output_index": 0, "content_index": 0}
        if not self._open:
            self._open = True
            item = _message(f"{self._id}-message", [], "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **place, part=_part("", []))
        self._told[at] += len(delta.ids)
        logprobs = self._cards(delta)
        yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=logprobs)

    def end(self, at: int, answer: ModelAnswer) -> Iterator[Event]:
        whole = self.whole([answer])
        rest = answer.tokens_after(self._told[at])
        if not self._open and (answer.text or not answer.calls):
            yield from self.text(at, rest._replace(text=answer.text))
        elif self._open and self._cards(rest):
            yield from self.text(at, rest)
        for index, item in enumerate(whole["output"]):
            place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                (part,) = item["content"]
                place |= {"content_index": 0}
                said = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **place, **said)
                yield self._event("response.content_part.done", **place, part=part)
            else:
                begun = item | {"arguments": "", "status": "in_progress"}
                written = item["arguments"]
                yield self._event("response.output_item.added", output_index=index, item=begun)
                yield self._event("response.function_call_arguments.delta", **place, delta=written)
                yield self._event("response.function_call_arguments.done", **place, arguments=written)
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def error(self, shape: dict[str, Any]) -> dict[str, Any]:
        """In OpenAI's form and, below `error`, in that of Open Responses."""
        flat = {name: shape["error"][name] for name in ("code", "message", "param")}
        return self._data("error", **flat, **shape)

    def _event(self, name: str, **data: Any) -> Event:
        return name, self._data(name, **data)

    def _data(self, name: str, **data: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": name, "sequence_number": self._number, **data}

    def _cards(self, tokens: TextDelta) -> list[dict[str, Any]]:
        """The log-probs of these tokens, where the client wants them and they are known."""
        wanted = _LOGPROBS in (self._body.get("include") or ())
        return token_cards(self._body, tokens, self._decode) if wanted and self._decode is not None else []

    def _items(self, answer: ModelAnswer) -> list[dict[str, Any]]:
        items = []
        if answer.text or not answer.calls:
            part = _part(answer.text, self._cards(answer.tokens_after(0)))
            status = "incomplete" if _cut(answer) else "completed"
            items.append(_message(f"{self._id}-message", [part], status))
        for call in answer.calls:
            items.append(
                {
                    "id": call.id.replace("call_", "fc_"), "type": "function_call", "call_id": call.id,
                    "name": call.name, "arguments": call.arguments, "status": "completed",
                }
            )  # fmt: skip
        return items

    def _head(self, status: str) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id, "object": "response", "created_at": int(time.time()), "completed_at": None,
            "status": status,
            "model": self._model, "output": [], "error": None, "incomplete_details": None,
            "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
            "parallel_tool_calls": bool(body.get("parallel_tool_calls", True)),
            "temperature": _or_one(body.get("temperature")), "top_p": _or_one(body.get("top_p")),
            **{name: body.get(name) or 0.0 for name in ("presence_penalty", "frequency_penalty")},
            "top_logprobs": body.get("top_logprobs") or 0,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [_shown_tool(tool) for tool in body.get("tools") or []], "max_tool_calls": None,
            "max_output_tokens": body.get("max_output_tokens"), "usage": None, "background": False,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
            "text": {"format": {"type": "text"}, **(body.get("text") or {})}, "truncation": "disabled",
            "service_tier": "default", "user": None, "safety_identifier": None, "prompt_cache_key": None,
        }  # fmt: skip


async def responses(server: Server, request: Request) -> Response:
    body = await server.body(request, API.fields["v1/responses"])
    model = await server.model_of(body)
    asked = await server.formed(read_response, body, model)
    writer = ResponseWriter(body, model.name, getattr(model.policy, "decode", None))
    return await server.answered(request, [asked], model, writer)


API = ServedApi(
    handlers={"v1/responses": responses},
    fields={
        "v1/responses": SAMPLED | {
            "input", "instructions", "max_output_tokens", "include", "tools", "tool_choice", "text",
            "top_logprobs", "return_tokens_as_token_ids",
        },
    },
)  # fmt: skip
