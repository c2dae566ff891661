"""A dialect in which every text is an action, so that a model of random weights works for as many turns as a
test needs. One in twelve delegates."""

from __future__ import annotations

from collections.abc import Sequence

from nano_coder.agent.dialects.dialect import Parsed
from nano_shared.types import ToolCall, ToolSpec


class AnyText:
    name = "any-text"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        if sum(map(ord, text)) % 12 == 0 and any(tool.name == "delegate" for tool in tools):
            asked = {"prompt": text.strip() or "nothing", "max_turns": 3}
            return Parsed(thought=text, calls=(ToolCall(name="delegate", arguments=asked),))
        step = {"step": text.strip()[:200] or "nothing", "status": "pending"}
        return Parsed(thought=text, calls=(ToolCall(name="plan", arguments={"steps": [step]}),))

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        return thought

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return "Write anything."


ANY_TEXT = AnyText()
