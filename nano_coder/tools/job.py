"""The tool `job`: the output and the end of background jobs of the tool `bash`."""

from __future__ import annotations

from nano_coder.tools.bash import order
from nano_coder.tools.shell import execution_result
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool


@tool(mutates=True)
def job(context: ToolContext, number: int | None = None, wait: float = 0, stop: bool = False) -> ToolResult:
    """Show what a background job has written since the last time, and whether it runs; without a number, list
    the jobs. With wait, give it so many seconds to end; with stop, end it."""
    context.keep()
    if number is None:
        done = order(context, op="list")
        return ToolResult(text=execution_result(done).text if done.stdout else "[no jobs]", execution=done)
    longest = context.limits.tool_seconds * 0.8
    if not 0 <= wait <= longest:
        raise ToolFailure(f"wait is 0 to {longest:g} seconds")
    op = {"op": "stop"} if stop else {"op": "read", "wait": wait}
    return execution_result(order(context, number=number, **op))
