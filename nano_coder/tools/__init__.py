"""The tools an agent acts with: one file each, registered in one dictionary."""

from nano_coder.tools.calculate import calculate
from nano_coder.tools.edit_file import edit_file
from nano_coder.tools.python import python
from nano_coder.tools.read_file import read_file
from nano_coder.tools.search import search
from nano_coder.tools.shell import shell
from nano_coder.tools.submit import submit
from nano_coder.tools.tool import Tool, ToolContext, ToolFailure, ToolResult, tool
from nano_coder.tools.write_file import write_file

TOOLS: dict[str, Tool] = {
    t.spec.name: t for t in (read_file, edit_file, write_file, search, shell, python, calculate, submit)
}

__all__ = ["TOOLS", "Tool", "ToolContext", "ToolFailure", "ToolResult", "tool"]
