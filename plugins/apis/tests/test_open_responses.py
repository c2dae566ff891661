"""The cases of Open Responses' compliance suite as data, judged by types generated from its OpenAPI file.

The suite itself is a web page's, in TypeScript; its requests and what it looks for are written anew here. Its
case `image-input` is refused: no model that is served reads images.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import openresponses_types.types as spec
import pytest
from pydantic import BaseModel
from test_serve import CALL, Served, scripted, serve

__all__ = ["scripted", "serve"]
EVENTS: dict[str, type[BaseModel]] = {
    next(iter(found.model_fields["type"].annotation)).value: found
    for name, found in vars(spec).items()
    if name.endswith("StreamingEvent")
}
ADD = {
    "type": "function", "name": "add", "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}  # fmt: skip


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


class Case(NamedTuple):
    request: dict[str, Any]
    answer: str = "Good day to you."
    output: tuple[str, ...] = ("message",)
    """types of its items"""


TURNS = [said("user", "I am Ada."), said("assistant", "Hello, Ada."), said("user", "Who am I?")]
CASES = {
    "basic-response": Case({"input": [said("user", "Greet me in four words.")]}),
    "text input": Case({"input": "Greet me.", "instructions": "Be brief.", "temperature": 0, "top_p": 0.5}),
    "system-prompt": Case({"input": [said("system", "Speak as a sailor."), said("user", "Greet me.")]}),
    "developer": Case({"input": [said("developer", "Be brief."), said("user", "Greet me.")]}),
    "multi-turn": Case({"input": TURNS}),
    "tool-calling": Case({"input": [said("user", "1 + 2?")], "tools": [ADD]}, CALL, ("function_call",)),
    "text and call": Case(
        {"input": "1 + 2?", "tools": [ADD], "tool_choice": "auto", "parallel_tool_calls": False},
        f"I add.\n{CALL}", ("message", "function_call"),
    ),
    "tool result": Case({
        "tools": [{"type": "function", "name": "add"}],
        "input": [said("user", "1 + 2?"),
                  {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1, "b": 2}'},
                  {"type": "function_call_output", "call_id": "c", "output": "3"}],
    }),
    "settings": Case({
        "input": "Greet me.", "metadata": {"of": "a test"}, "text": {"verbosity": "low"}, "store": True,
        "max_output_tokens": 64, "top_logprobs": 2, "include": ["message.output_text.logprobs"],
    }),
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("name", CASES)
def test_a_response_is_of_the_form_that_the_specification_says(
    scripted: Callable[..., Served], name: str
) -> None:
    case = CASES[name]
    server = scripted([case.answer])
    answer = httpx.post(f"{server.root}/v1/responses", json={"model": "nano", **case.request}, timeout=60)
    assert answer.status_code == 200
    spec.ResponseResource.model_validate_json(answer.text, strict=True)
    assert answer.json()["status"] == "completed"
    assert tuple(item["type"] for item in answer.json()["output"]) == case.output


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CASES)
def test_the_events_of_a_stream_are_of_their_forms_and_in_order(
    scripted: Callable[..., Served], name: str
) -> None:
    case = CASES[name]
    server = scripted([case.answer])
    body = {"model": "nano", **case.request, "stream": True}
    events = []
    for block in httpx.post(f"{server.root}/v1/responses", json=body, timeout=60).text.strip().split("\n\n"):
        head, _, line = block.partition("\n")
        data = line.removeprefix("data: ")
        EVENTS[head.removeprefix("event: ")].model_validate_json(data, strict=True)
        events.append(json.loads(data))
        assert events[-1]["type"] == head.removeprefix("event: ")
    kinds = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    assert tuple(item["type"] for item in events[-1]["response"]["output"]) == case.output
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        part = "function_call_arguments" if item["type"] == "function_call" else "output_text"
        said = "arguments" if item["type"] == "function_call" else "text"
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        (done,) = [event for event in own if event["type"] == f"response.{part}.done"]
        deltas = [event["delta"] for event in own if event["type"] == f"response.{part}.delta"]
        assert ("".join(deltas), done[said]) == (whole, whole)
        assert (own[0]["type"], own[-1]["type"]) == (
            "response.output_item.added", "response.output_item.done",
        )  # fmt: skip
        assert own[-1]["item"] == item


def test_an_image_is_refused_with_a_sentence(scripted: Callable[..., Served]) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    body = {"input": [{**said("user", ""), "content": [{"type": "input_text", "text": "See?"}, image]}]}
    answer = httpx.post(f"{scripted(['x']).root}/v1/responses", json=body)
    assert (answer.status_code, "input_image" in answer.json()["error"]["message"]) == (400, True)
