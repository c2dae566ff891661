"""The Dialect protocol: how a model writes an action, and how an action is parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nano_shared.extensions import described
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


def find_tool(name: str, tools: Sequence[ToolSpec]) -> ToolSpec | None:
    return next((tool for tool in tools if tool.name == name), None)


def no_dialect(value: object) -> str | None:
    """Why a value is not a dialect; None if it is."""
    lacks = [name for name in ("parse", "render", "describe") if not callable(getattr(value, name, None))]
    lacks += [name for name in ("name",) if not hasattr(value, name)]
    if isinstance(value, type):
        return f"is {described(value)}; register an instance of it"
    return f"is no dialect: it has no {lacks[0]}" if lacks else None
