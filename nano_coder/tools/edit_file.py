"""The tool `edit_file`: replace one line by its number, or one exact passage."""

from __future__ import annotations

from nano_coder.tools.read_file import read_text
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_coder.tools.write_file import write_text


@tool(body="new", mutates=True)
def edit_file(
    context: ToolContext, path: str, new: str, line: int | None = None, old: str | None = None
) -> ToolResult:
    """Replace line number `line`, or the only occurrence of `old`, by `new`."""
    if (line is None) == (old is None):
        raise ToolFailure("give either line (a number) or old (a text that occurs once)")
    text = read_text(context.jail, path)
    if line is not None:
        edited = _replace_line(path, text, line, new)
    else:
        edited = _replace_passage(path, text, old or "", new)
    write_text(context.jail, path, edited)
    return ToolResult(text=f"edited {path}")


def _replace_line(path: str, text: str, line: int, new: str) -> str:
    lines = text.splitlines(keepends=True)
    if not 1 <= line <= len(lines):
        raise ToolFailure(f"{path} has lines 1 to {len(lines)}, not {line}")
    ending = "\n" if lines[line - 1].endswith("\n") and not new.endswith("\n") else ""
    lines[line - 1] = new + ending
    return "".join(lines)


def _replace_passage(path: str, text: str, old: str, new: str) -> str:
    found = text.count(old) if old else 0
    if found != 1:
        raise ToolFailure(f"old must occur exactly once in {path}; it occurs {found} times")
    return text.replace(old, new)
