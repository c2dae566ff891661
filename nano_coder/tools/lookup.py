"""The tool `lookup`: reads the knowledge base that is given with the task."""

from __future__ import annotations

from pydantic import TypeAdapter

from nano_coder.tools.record_file import Records
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

FACTS: Records[dict[str, str | int]] = Records("facts.json", TypeAdapter(dict[str, dict[str, str | int]]))


@tool()
def lookup(context: ToolContext, subject: str) -> ToolResult:
    """Show what is known about a subject: a person, a place, a thing."""
    facts = FACTS.load(context)
    names = {name.casefold(): name for name in facts}
    name = names.get(subject.strip().casefold())
    if name is None:
        raise ToolFailure(f"nothing is known about {subject!r}")
    return ToolResult(text="\n".join(f"{key}: {value}" for key, value in facts[name].items()))
