"""The compact dialect: one action a turn, cheap enough for a small model.

    an optional thought
    @edit_file path=stats.py line=4
        return total / len(values)

A header line `@tool key=value ...`, then the tool's body parameter, raw, to the end of the completion.
A string is bare where that is safe and a JSON string elsewhere; every other value is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from nano_coder.agent.dialects.dialect import Parsed, find_tool
from nano_shared.types import ToolCall, ToolSpec

_HEADER = re.compile(r"^@([A-Za-z_][A-Za-z0-9_.-]*)(?: (.*))?$", re.MULTILINE)
_KEY = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)=")
_BARE = re.compile(r"[A-Za-z0-9_./+:,*-]+")
_EXAMPLE = "write one action: a line `@tool key=value`, then any long text on the lines below it"


class Compact:
    name = "compact"

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        header = _HEADER.search(text)
        if header is None:
            return Parsed(thought=text, error=f"no action found; {_EXAMPLE}")
        thought = text[: header.start()].removesuffix("\n")
        name, rest = header.group(1), header.group(2) or ""
        spec = find_tool(name, tools)
        try:
            arguments = _read_arguments(rest, spec)
        except ValueError as problem:
            return Parsed(thought=thought, error=f"@{name}: {problem}; {_EXAMPLE}")
        if header.end() < len(text):
            body = text[header.end() + 1 :]
            if spec is not None and spec.body is None:
                if body.strip():
                    return Parsed(thought=thought, error=f"@{name} takes no text below its line; {_EXAMPLE}")
            elif (key := spec.body if spec and spec.body else "body") in arguments:
                return Parsed(thought=thought, error=f"@{name}: {key} is given twice; {_EXAMPLE}")
            else:
                arguments[key] = body
        return Parsed(thought=thought, calls=(ToolCall(name=name, arguments=arguments),))

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str:
        if len(calls) != 1:
            raise ValueError(f"the compact dialect writes one call a turn, not {len(calls)}")
        if _HEADER.search(thought):
            raise ValueError("a thought cannot hold a line that looks like an action")
        (call,) = calls
        spec = find_tool(call.name, tools)
        body_key = spec.body if spec else None
        parts = [f"@{call.name}"]
        body = None
        for key, value in call.arguments.items():
            if key == body_key and isinstance(value, str):
                body = value
            else:
                parts.append(f"{key}={_write_value(value, _type_of(key, spec))}")
        text = " ".join(parts) if body is None else " ".join(parts) + "\n" + body
        return f"{thought}\n{text}" if thought else text

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return "\n".join(_describe(tool) for tool in tools)


def _describe(tool: ToolSpec) -> str:
    keys = [f"{key}=" for key in tool.parameters.get("properties", {}) if key != tool.body]
    line = " ".join([f"@{tool.name}", *keys])
    return f"{line} then {tool.body} below" if tool.body else line


def _type_of(key: str, spec: ToolSpec | None) -> set[str]:
    """JSON types that the parameter accepts; string for an unknown parameter."""
    schema = (spec.parameters.get("properties", {}) if spec else {}).get(key, {"type": "string"})
    options = schema.get("anyOf", [schema])
    return {str(option.get("type", "any")) for option in options}


def _write_value(value: Any, types: set[str]) -> str:
    if isinstance(value, str) and "string" in types and _BARE.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read_arguments(text: str, spec: ToolSpec | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    position = 0
    while text[position:].strip():
        match = _KEY.match(text, position)
        if match is None:
            raise ValueError(f"cannot read `{text[position:].strip()}` as key=value")
        key = match.group(1)
        if key in arguments:
            raise ValueError(f"{key} is given twice")
        arguments[key], position = _read_value(text, match.end(), _type_of(key, spec))
    return arguments


def _read_value(text: str, start: int, types: set[str]) -> tuple[Any, int]:
    bare = _BARE.match(text, start)
    if bare and "string" in types and (bare.end() == len(text) or text[bare.end()].isspace()):
        return bare.group(), bare.end()
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError:
        end = next((i for i in range(start, len(text)) if text[i].isspace()), len(text))
        raise ValueError(f"`{text[start:end]}` is not a value; quote text with spaces as JSON") from None


COMPACT = Compact()
