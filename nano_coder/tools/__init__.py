"""The tools an agent acts with, by name: entry points of `nano.tools`, one noun a file."""

from nano_coder.tools.registry import TOOLS, Tools
from nano_coder.tools.tool import Tool, ToolContext, ToolFailure, ToolResult, tool

__all__ = ["TOOLS", "Tool", "ToolContext", "ToolFailure", "ToolResult", "Tools", "tool"]
