"""How a model writes an action: the Dialect protocol, parsing of a whole text or while it is sampled, and the
compact dialect, one action a turn, cheap enough for a small model:

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
from dataclasses import dataclass
from typing import Any, Protocol

from nano_shared.extension_points import Extensions, described
from nano_shared.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    thought: str = ""
    """text besides the calls and the reasoning"""
    reasoning: str = ""
    """text inside the model's reasoning tags or channel"""
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    repairs: tuple[str, ...] = ()
    """repairs that the parser made, by name"""
    prose: bool = False
    """True if the completion contains nothing that looks like a call"""


class Dialect(Protocol):
    """A way to write actions. `parse(render(thought, calls, tools), tools)` returns thought and calls."""

    name: str

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed: ...

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str: ...

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """The description of the tools in the system message."""


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI's function schema, which chat templates take."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def find_tool(name: str, tools: Sequence[ToolSpec]) -> ToolSpec | None:
    return next((tool for tool in tools if tool.name == name), None)


def types_of(key: str, spec: ToolSpec | None) -> set[str]:
    """JSON types that a parameter accepts; none where its schema does not say."""
    schema = (spec.parameters.get("properties", {}) if spec else {}).get(key, {})
    kinds = [option.get("type") for option in schema.get("anyOf", [schema])]
    return {kind for one in kinds for kind in (one if isinstance(one, list) else [one]) if kind}


def no_dialect(value: object) -> str | None:
    """Why a value is not a dialect; None if it is."""
    lacks = [name for name in ("parse", "render", "describe") if not callable(getattr(value, name, None))]
    lacks += [name for name in ("name",) if not hasattr(value, name)]
    if isinstance(value, type):
        return f"is {described(value)}; register an instance of it"
    return f"is no dialect: it has no {lacks[0]}" if lacks else None


class StreamParser:
    """Parses a text that arrives in pieces of any size. Text that was returned once is never revised.

    Text is returned as soon as no continuation can change it: text after the possible start of a tag waits,
    and all text waits until the end under a dialect whose calls have no tags, and if the prompt may have
    opened reasoning."""

    def __init__(self, dialect: Dialect, tools: Sequence[ToolSpec]) -> None:
        self._dialect, self._tools = dialect, tools
        self._text = ""
        self._shown = Parsed()

    def feed(self, piece: str) -> Parsed:
        """Adds a piece of the text. Returns the new parts of `reasoning` and `thought`."""
        self._text += piece
        visible = getattr(self._dialect, "visible", None)
        return self._new(visible(self._text, self._tools)) if visible else Parsed()

    def finish(self) -> tuple[Parsed, Parsed]:
        """The parse of the whole text, and the parts that `feed` did not return."""
        whole = self._dialect.parse(self._text, self._tools)
        return whole, self._new(whole)

    def _new(self, seen: Parsed) -> Parsed:
        before, self._shown = self._shown, seen
        return Parsed(
            reasoning=seen.reasoning[len(before.reasoning) :], thought=seen.thought[len(before.thought) :]
        )


def settled(text: str, marks: Sequence[str]) -> str:
    """The text up to the first mark, or to an end that may begin one."""
    ends = [text.find(mark) for mark in marks]
    ends += [at for mark in marks for at in range(max(0, len(text) - len(mark) + 1), len(text))
             if mark.startswith(text[at:])]  # fmt: skip
    return text[: min((end for end in ends if end >= 0), default=len(text))]


DIALECTS: Extensions[Dialect] = Extensions("nano.dialects", check=no_dialect)
"""by name"""


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
                parts.append(f"{key}={_write_value(value, _is_text(key, spec))}")
        text = " ".join(parts) if body is None else " ".join(parts) + "\n" + body
        return f"{thought}\n{text}" if thought else text

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        return "\n".join(_describe(tool) for tool in tools)


def _describe(tool: ToolSpec) -> str:
    keys = [f"{key}=" for key in tool.parameters.get("properties", {}) if key != tool.body]
    line = " ".join([f"@{tool.name}", *keys])
    return f"{line} then {tool.body} below" if tool.body else line


def _is_text(key: str, spec: ToolSpec | None) -> bool:
    """Whether the parameter takes text, as an unknown one does."""
    known = spec.parameters.get("properties", {}) if spec else {}
    return key not in known or "string" in types_of(key, spec)


def _write_value(value: Any, as_text: bool) -> str:
    if isinstance(value, str) and as_text and _BARE.fullmatch(value):
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
        arguments[key], position = _read_value(text, match.end(), _is_text(key, spec))
    return arguments


def _read_value(text: str, start: int, as_text: bool) -> tuple[Any, int]:
    bare = _BARE.match(text, start)
    if bare and as_text and (bare.end() == len(text) or text[bare.end()].isspace()):
        return bare.group(), bare.end()
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except json.JSONDecodeError:
        end = next((i for i in range(start, len(text)) if text[i].isspace()), len(text))
        raise ValueError(f"`{text[start:end]}` is not a value; quote text with spaces as JSON") from None


COMPACT = Compact()
