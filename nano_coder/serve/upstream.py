"""What a server in front of another one passes on: messages and calls as the API has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_coder.agent.dialects.api import API
from nano_coder.agent.dialects.dialect import Parsed
from nano_coder.models.endpoint.exchange import EndpointError
from nano_coder.serve.request import ClientCall, ClientMessage, OnText, TextDelta
from nano_shared.types import ApiAnswer, ApiCall, Completion, Message, Role, ToolSpec

_OURS = frozenset({
    "model", "messages", "tools", "stream", "stream_options", "temperature", "top_p", "top_k", "seed", "stop",
    "stop_sequences", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs",
    "return_token_ids",
})  # fmt: skip
"""parameters of a chat completion that the request holds elsewhere"""


def passed_on(body: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a chat completion that the server behind gets as they are; None leaves one out."""
    more = {name: value for name, value in body.items() if name not in _OURS}
    unsaid = {"temperature": None} if body.get("temperature") is None else {}
    lengths = ("max_tokens", "max_completion_tokens")
    if all(body.get(name) is None for name in lengths):
        unsaid |= dict.fromkeys(lengths)
    return more | unsaid


def messages(new: Sequence[ClientMessage], before: ApiAnswer | None) -> tuple[Message, ...]:
    """The messages with the ids of calls that the server behind gave: clients may have their own.

    `before` is the answer that they follow.
    """
    ids = [call.id for call in before.calls] if before else []
    shown, place = [], 0
    for message in new:
        if message.calls:
            ids, place = [call.id for call in message.calls], 0
        call_id = None
        if message.role is Role.TOOL:
            given = message.call_id
            call_id = given if given in ids else ids[place] if place < len(ids) else None
            place += 1
        if message.role is Role.TOOL and call_id is None:  # it answers a call that stood in the text
            shown.append(Message(role=Role.USER, content=message.text))
            continue
        calls = tuple(ApiCall(id=c.id, name=c.name, arguments=c.arguments) for c in message.calls)
        shown.append(Message(role=message.role, content=message.text, calls=calls, call_id=call_id))
    return tuple(shown)


def parsed(completion: Completion, tools: Sequence[ToolSpec]) -> Parsed:
    """The calls that came beside the text, as values, or that a server without a parser left in it; the text
    alone where there are none."""
    given = completion.api
    if given is not None and given.calls:
        return API.parse_api(completion.text, given, tools)
    found = API.parse(completion.text, tools) if tools else Parsed()
    known = {tool.name for tool in tools}
    if found.calls and all(call.name in known for call in found.calls):
        return found
    return Parsed(thought=completion.text)


def calls(completion: Completion) -> tuple[ClientCall, ...]:
    """The calls as they came beside the text."""
    given = completion.api.calls if completion.api else ()
    return tuple(ClientCall(id=c.id, name=c.name, arguments=c.arguments) for c in given)


@dataclass(slots=True)
class Relay:
    """Hands on each text with the tokens since the last one. Called with nothing, asks whether to go on."""

    on_text: OnText
    may_call: bool = False
    """whether tools were offered: then text that may become a call is held back"""
    text: str = ""
    shown: int = 0
    """characters of the text that were handed on"""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __call__(self, text: str, ids: Sequence[int], logprobs: Sequence[float]) -> bool:
        self.ids += ids
        self.logprobs += logprobs
        self.text += text
        end = API.settled(self.text) if self.may_call else len(self.text)
        if end <= self.shown:
            return self.on_text(TextDelta())
        text, self.shown = self.text[self.shown : end], end
        delta = TextDelta(text, tuple(self.ids), tuple(self.logprobs))
        self.ids, self.logprobs = [], []
        return self.on_text(delta)


_GATEWAY = {"unreachable": 502, "late": 504, "busy": 503, "garbled": 502, "refused": 502}


def status(problem: EndpointError) -> int:
    """The HTTP status for a client of a server whose server behind failed so: its own where it gave one."""
    return problem.status or _GATEWAY[problem.kind]
