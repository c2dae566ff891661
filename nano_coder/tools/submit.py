"""The tool `submit`: ends the run, with an answer if the task asks for one."""

from __future__ import annotations

from nano_coder.tools.tool import ToolContext, ToolResult, tool


@tool(body="answer")
def submit(context: ToolContext, answer: str | None = None) -> ToolResult:
    """Finish. Give the answer if the task asks for one."""
    return ToolResult(text="submitted", finished=True, answer=answer)
