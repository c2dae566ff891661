"""The Hermes dialect, as Hermes and Qwen models write it: JSON inside `<tool_call>` tags."""

from __future__ import annotations

import json
from collections.abc import Sequence

from nano_coder.agent.dialects.dialect import Parsed, function_schema
from nano_coder.agent.dialects.untagged import untagged_calls
from nano_shared.types import ToolCall, ToolSpec

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_EXAMPLE = f'write {_OPEN}{{"name": "...", "arguments": {{...}}}}{_CLOSE}'


class Hermes:
    name = "hermes"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        start = text.find(_OPEN)
        if start < 0:
            if found := untagged_calls(text, tools):
                thought = text[: found.start].removesuffix("\n")
                return Parsed(thought=thought, calls=found.calls, repairs=found.repairs)
            return Parsed(thought=text, error=f"no tool call found; {_EXAMPLE}")
        thought = text[:start].removesuffix("\n")
        calls: list[ToolCall] = []
        repairs: list[str] = []
        while start >= 0:
            try:
                call, end = _read_call(text, start + len(_OPEN))
            except ValueError as problem:
                return Parsed(thought=thought, error=f"{problem}; {_EXAMPLE}")
            calls.append(call)
            rest = text[end:].lstrip()
            if rest and not rest.startswith(_CLOSE):
                return Parsed(thought=thought, error=f"text where {_CLOSE} was due; {_EXAMPLE}")
            if not rest:
                repairs.append("closed_tag")
            # the next call starts after this one's JSON, so a tag inside a string does not end it
            start = text.find(_OPEN, end)
        return Parsed(thought=thought, calls=tuple(calls), repairs=tuple(repairs))

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        if _OPEN in thought:
            raise ValueError(f"a thought cannot hold {_OPEN}")
        blocks = [f"{_OPEN}\n{json.dumps(call.model_dump(), ensure_ascii=False)}\n{_CLOSE}" for call in calls]
        return "\n".join([thought, *blocks] if thought else blocks)

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return "\n".join(json.dumps(function_schema(tool), ensure_ascii=False) for tool in tools)


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError) as problem:
        raise ValueError(f"the tool call is not JSON ({problem})") from None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('the tool call must be an object with a "name"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict) or set(value) - {"name", "arguments"}:
        raise ValueError('the tool call must hold "name" and an object of "arguments" and nothing else')
    return ToolCall(name=value["name"], arguments=arguments), end


HERMES = Hermes()
