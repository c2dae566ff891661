"""The Dialect protocol: how a model writes an action, how it is parsed, whole or while it is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nano_shared.extensions import Extensions, described
from nano_shared.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed completion: its calls, or what was wrong with it."""

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
        ...


def function_schema(tool: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI's function schema, which chat templates take."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def find_tool(name: str, tools: Sequence[ToolSpec]) -> ToolSpec | None:
    return next((tool for tool in tools if tool.name == name), None)


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
