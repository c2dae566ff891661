"""What a dialect is: how a model writes an action, and how an action is read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nano_shared.types import ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A completion read: its calls, or what was wrong with it."""

    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    repairs: tuple[str, ...] = ()


class Dialect(Protocol):
    """Parse and render are inverses: `parse(render(thought, calls, tools), tools)` gives both back."""

    name: str
    max_calls: int | None
    """calls that one completion can hold; None is any number"""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Parsed: ...

    def render(self, thought: str, calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> str: ...

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        """The tools as the system message shows them."""
        ...


def find_tool(name: str, tools: Sequence[ToolSpec]) -> ToolSpec | None:
    return next((tool for tool in tools if tool.name == name), None)
