"""OpenAI's responses: requests read, answers and events written. Nothing is stored: `store` is ignored.

Tool types that only OpenAI can run are left out of what the model sees, and the request is served without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nano_coder.serve.answer_form import form_of
from nano_coder.serve.anthropic import Event
from nano_coder.serve.chat import Body, sampling_of
from nano_coder.serve.request import (
    BadRequest,
    ClientCall,
    ClientMessage,
    ModelAnswer,
    ModelRequest,
    objects,
    role_of,
    text_of,
    tool_of,
)
from nano_shared.types import Finish, Role

_ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


def read_response(body: Body, longest: int) -> ModelRequest:
    """Raises BadRequest for what is malformed, and for what this server cannot do."""
    if body.get("previous_response_id"):
        raise BadRequest(
            "previous_response_id: no response is stored here; send the whole input",
            param="previous_response_id",
        )
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
    if body.get("tool_choice") == "none":
        tools = []
    offered = tuple(tool_of(tool, where=f"tools[{at}]") for at, tool in enumerate(tools))
    text = body.get("text")
    form = text.get("format") if isinstance(text, Mapping) else None
    return ModelRequest(
        messages=tuple(read),
        tools=offered,
        form=form_of(form, body.get("tool_choice"), offered, param="text.format"),
        sampling=sampling_of(body, longest, limits=("max_output_tokens",)),
    )


def _add(read: list[ClientMessage], item: Body, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            role = role_of(item, _ROLES, where)
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
        case _:
            pass  # reasoning, and items of tools that only OpenAI runs


def _join(read: list[ClientMessage], message: ClientMessage) -> None:
    """One turn of the assistant is several items: its text and each of its calls."""
    last = read[-1] if read else None
    if last and last.role is Role.ASSISTANT and message.role is Role.ASSISTANT and message.calls:
        read[-1] = ClientMessage(role=last.role, text=last.text, calls=(*last.calls, *message.calls))
    else:
        read.append(message)


def response_answer(body: Body, answer: ModelAnswer, model: str, id: str) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    cut = answer.completion.finish is Finish.LENGTH
    told = _head(body, model, id, "incomplete" if cut else "completed") | {
        "output": _items(answer, id),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": answer.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.sampled_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
        },
    }  # fmt: skip
    tokens = answer.completion.tokens
    if body.get("return_token_ids") and tokens is not None:
        told |= {"prompt_token_ids": list(answer.prompt_ids), "token_ids": list(tokens.sampled_ids)}
    return told


def _head(body: Body, model: str, id: str, status: str) -> dict[str, Any]:
    return {
        "id": id, "object": "response", "created_at": int(time.time()), "status": status,
        "model": str(body.get("model") or model), "output": [], "error": None, "incomplete_details": None,
        "instructions": body.get("instructions"), "metadata": body.get("metadata") or {},
        "parallel_tool_calls": bool(body.get("parallel_tool_calls", True)),
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [],
        "top_p": body.get("top_p"), "max_output_tokens": body.get("max_output_tokens"), "usage": None,
        "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
        "text": body.get("text") or {"format": {"type": "text"}}, "truncation": "disabled", "user": None,
    }  # fmt: skip


def _items(answer: ModelAnswer, id: str) -> list[dict[str, Any]]:
    items = []
    if answer.text or not answer.calls:
        items.append(_message(f"{id}-message", answer.text, "completed"))
    for call in answer.calls:
        items.append(
            {
                "id": call.id.replace("call_", "fc_"), "type": "function_call", "call_id": call.id,
                "name": call.name, "arguments": call.arguments, "status": "completed",
            }
        )  # fmt: skip
    return items


def _message(id: str, text: str, status: str) -> dict[str, Any]:
    content = [_part(text)] if status == "completed" else []
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ResponseEvents:
    """The events of a streamed response."""

    def __init__(self, body: Body, model: str, id: str) -> None:
        self._body, self._model, self._id = body, model, id
        self._number = -1
        self._message = f"{id}-message"
        self._said: list[str] | None = None

    def first(self) -> Iterator[Event]:
        started = _head(self._body, self._model, self._id, "in_progress")
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def text(self, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> Iterator[Event]:
        place = {"item_id": self._message, "output_index": 0, "content_index": 0}
        if self._said is None:
            self._said = []
            item = _message(self._message, "", "in_progress")
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **place, part=_part(""))
        self._said.append(text)
        yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def end(self, answer: ModelAnswer) -> Iterator[Event]:
        whole = response_answer(self._body, answer, self._model, self._id)
        if self._said is None and (answer.text or not answer.calls):
            yield from self.text(answer.text, (), ())
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                place = {"item_id": self._message, "output_index": index, "content_index": 0}
                yield self._event("response.output_text.done", **place, text=answer.text, logprobs=[])
                yield self._event("response.content_part.done", **place, part=_part(answer.text))
            else:
                begun = item | {"arguments": "", "status": "in_progress"}
                place = {"item_id": item["id"], "output_index": index}
                yield self._event("response.output_item.added", output_index=index, item=begun)
                yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
                yield self._event(
                    "response.function_call_arguments.done", **place, arguments=item["arguments"]
                )
            yield self._event("response.output_item.done", output_index=index, item=item)
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, name: str, **data: Any) -> Event:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number, **data}
