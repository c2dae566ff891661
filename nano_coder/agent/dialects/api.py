"""The dialect of APIs: tools go out as schemas, calls come back beside the text.

A call that a server left in the text, for want of a tool parser, is read as the model's family writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from nano_coder.agent.dialects.dialect import DIALECTS, Parsed, settled
from nano_coder.agent.dialects.native import HERMES, QWEN_CODER, Native
from nano_coder.agent.dialects.untagged import (
    arguments_of,
    fenced,
    missed_call,
    read_json,
    settled_before_call,
)
from nano_shared.types import ApiAnswer, ToolCall, ToolSpec

NO_CALL = "no tool was called; go on with a tool, or call submit if the task is done"
_LEFT_IN_TEXT = ("qwen-coder", "mistral-args", "deepseek", "kimi")
"""families whose marks no other text holds, as far as they are installed; the first reads JSON too"""


@cache
def _families() -> tuple[Native, ...]:
    found = (DIALECTS[name] for name in _LEFT_IN_TEXT if name in DIALECTS)
    return tuple(each for each in found if isinstance(each, Native))


FILTERED = (
    "the provider's filter stopped this answer (content_filter), and nothing of it was executed; go on in"
    " other words"
)


class Api:
    name = "api"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        family = next((one for one in _families() if any(mark in text for mark in one.markers)), QWEN_CODER)
        found = family.parse(text, tools)
        if found.error is None:
            return replace(found, repairs=("call_in_text", *found.repairs))
        missed = None if found.prose else missed_call(family.reasoning(text, tools)[1], tools)
        if missed is not None and not found.error.startswith("no tool call"):
            return found
        if missed is not None:
            error = f"no tool call could be read: {missed[0]}; call a tool, or write\n{fenced(missed[1])}"
            return replace(found, error=error)
        if found.prose or not text.strip():
            return replace(found, error=NO_CALL)
        return Parsed(thought=text, error=NO_CALL, prose=True)

    def settled(self, text: str) -> int:
        """The length of a growing text before anything that may become a call."""
        marks = [mark for family in _families() for mark in family.markers]
        return settled_before_call(settled(text, marks))

    def parse_api(self, text: str, answer: ApiAnswer, tools: Sequence[ToolSpec]) -> Parsed:
        """Parse the calls beside the text; the text itself where there are none."""
        if not answer.calls:
            return self.parse(text, tools)
        calls: list[ToolCall] = []
        repairs: list[str] = []
        for number, call in enumerate(answer.calls, 1):
            try:
                arguments = _arguments(call.arguments, repairs)
            except (ValueError, RecursionError) as problem:
                error = f"call {number}, {call.name}: {problem}; none of the calls was executed"
                return Parsed(thought=text, error=error)
            calls.append(ToolCall(name=call.name, arguments=arguments))
        return Parsed(thought=text, calls=tuple(calls), repairs=tuple(dict.fromkeys(repairs)))

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        return HERMES.render(thought, calls, tools) if calls else thought

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return ""


def _arguments(text: str, repairs: list[str]) -> dict[str, Any]:
    """The arguments of a call. Notes repairs; raises ValueError for what is no JSON object."""
    if not text.strip():
        return {}
    value, end = read_json(text, 0, repairs)
    if text[end:].strip():
        raise ValueError("text follows its arguments")
    return arguments_of(value, repairs)


API = Api()
