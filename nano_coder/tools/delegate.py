"""The tool `delegate`: a sub-agent works on a part of the task, in a context of its own."""

from __future__ import annotations

from nano_coder.tools.tool import ToolContext, ToolFailure, tool

MOST_TURNS = 100


@tool()
def delegate(context: ToolContext, prompt: str, max_turns: int = 20) -> str:
    """Hand a part of the work to a sub-agent with your tools and files and a context of its own. It knows
    nothing but the prompt, and you get nothing but its final answer. Must be the last call of a message."""
    if not prompt.strip():
        raise ToolFailure("the prompt is empty: say what the sub-agent shall do, and what it has to know")
    if not 1 <= max_turns <= MOST_TURNS:
        raise ToolFailure(f"max_turns is 1 to {MOST_TURNS}")
    return ""  # the loop lets the sub-agent work, and its answer is the observation
