"""A dialect, and a profile that speaks it: one action as a fenced block of JSON."""

import json
import re
from collections.abc import Sequence

from nano_coder.agent.dialects.dialect import Parsed
from nano_coder.agent.profiles import HERMES_1
from nano_shared.types import ToolCall, ToolSpec

_BLOCK = re.compile(r"(?:(.*)\n)?```action\n(.*?)\n```\s*", re.DOTALL)


class Fenced:
    name = "fenced"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        block = _BLOCK.fullmatch(text)
        try:
            calls = (ToolCall.model_validate_json(block[2]),) if block else ()
        except ValueError:
            calls = ()
        thought = (block[1] or "") if block else text
        return Parsed(thought=thought, calls=calls, error=None if calls else "write an ```action block")

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        blocks = [f"```action\n{json.dumps(call.model_dump())}\n```" for call in calls]
        return "\n".join([thought, *blocks] if thought else blocks)

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return "\n".join(f"{tool.name}: {tool.description} {json.dumps(tool.parameters)}" for tool in tools)


FENCED = Fenced()
FENCED_1 = HERMES_1.model_copy(
    update={
        "name": "fenced-1",
        "dialect": "fenced",
        "system": 'Act by one block a turn, ```action, {"name": ..., "arguments": {...}}, ```.\n{{ tools }}',
    }
)
