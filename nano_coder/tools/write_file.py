"""The tool `write_file`: creates or replaces a file of the workspace."""

from __future__ import annotations

from nano_coder.sandbox.protocol import Jail
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool


@tool(body="content", mutates=True)
def write_file(context: ToolContext, path: str, content: str) -> ToolResult:
    """Create or replace a file."""
    write_text(context.jail, path, content)
    return ToolResult(text=f"wrote {path}")


def write_text(jail: Jail, path: str, text: str) -> None:
    """Write a file of the workspace. Raises ToolFailure with a message that names the path."""
    try:
        jail.write(path, text.encode("utf-8", "surrogatepass"))
    except OSError as problem:
        raise ToolFailure(f"cannot write {path}: {problem.strerror or problem}") from None
