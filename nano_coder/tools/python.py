"""The tool `python`: runs a Python program in the workspace."""

from __future__ import annotations

from nano_coder.tools.shell import execution_result
from nano_coder.tools.tool import ToolContext, ToolResult, tool


@tool(body="code", mutates=True)
def python(context: ToolContext, code: str) -> ToolResult:
    """Run a Python program in the workspace and show its output."""
    return execution_result(context.run_python(code))
