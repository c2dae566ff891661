"""The tool `shell`: runs a command line in the workspace."""

from __future__ import annotations

from nano_coder.sandbox.protocol import ExecResult
from nano_coder.tools.tool import ToolContext, ToolResult, tool


@tool(body="command", mutates=True)
def shell(context: ToolContext, command: str) -> ToolResult:
    """Run a shell command in the workspace and show its output."""
    return execution_result(context.run(["/bin/sh", "-c", command]))


def execution_result(execution: ExecResult) -> ToolResult:
    """The result of a command: stdout, stderr, and how it ended if not with exit code 0."""
    parts = [_text(execution.stdout), _text(execution.stderr)]
    if execution.timed_out:
        parts.append("[timed out]")
    elif execution.oom:
        parts.append("[out of memory]")
    elif execution.signal is not None:
        parts.append(f"[killed by signal {execution.signal}]")
    elif execution.exit_code:
        parts.append(f"[exit code {execution.exit_code}]")
    text = "\n".join(part.rstrip("\n") for part in parts if part)
    return ToolResult(text=text or "[no output]", ok=execution.ok, execution=execution)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")
