"""The harmony dialect of gpt-oss: messages in channels; calls are messages to `functions.NAME`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from nano_coder.agent.dialects.dialect import Parsed
from nano_coder.agent.dialects.native import HERMES
from nano_coder.agent.dialects.untagged import arguments_of, read_json
from nano_shared.types import ToolCall, ToolSpec

_HEADER = re.compile(r"(?:<\|start\|>assistant)?((?:(?!<\|message\|>).)*?)<\|message\|>", re.DOTALL)
_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z")
_NOTHING = re.compile(r"\s*(?:<\||\Z)")
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_NEXT = "<|start|>assistant"


class Harmony:
    name = "harmony"
    howto = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}"
    markers = ("<|channel|>", "<|start|>")

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        reasoning: list[str] = []
        thought: list[str] = []
        calls: list[ToolCall] = []
        repairs: list[str] = []
        error: str | None = None
        at = 0
        while error is None and (header := _HEADER.match(text, at)):
            channel, target = _CHANNEL.search(header[1]), _TO.search(header[1])
            at = header.end()
            if target:
                try:
                    value, at = (None, at) if _NOTHING.match(text, at) else read_json(text, at, repairs)
                    calls.append(ToolCall(name=target[1], arguments=arguments_of(value, repairs)))
                except ValueError as problem:
                    error = f"{problem}; write {self.howto}"
            end = _END.search(text, at)
            assert end is not None  # it matches the end of the text
            if not target:
                said = reasoning if channel and channel[1] == "analysis" else thought
                said.append(text[at : end.start()])
            at = end.end()
        if text[at:].strip() and error is None:
            thought.append(text[at:])
        prose = not calls and error is None
        if prose:
            error = f"no tool call found; write {self.howto}"
        return Parsed(
            thought="\n".join(thought),
            reasoning="\n".join(reasoning),
            calls=() if error else tuple(calls),
            error=error,
            repairs=() if error else tuple(dict.fromkeys(repairs)),
            prose=prose and any(map(str.strip, thought)),
        )

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        if "<|" in thought:
            raise ValueError("a thought cannot hold control tokens")
        if not calls:
            return f"<|channel|>final<|message|>{thought}"
        said = f"<|channel|>commentary<|message|>{thought}<|end|>{_NEXT}" if thought else ""
        return said + f"<|call|>{_NEXT}".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            + json.dumps(call.arguments, ensure_ascii=False)
            for call in calls
        )

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return HERMES.describe(tools)


HARMONY = Harmony()
