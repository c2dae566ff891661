"""The tool `edit_file`: replaces one line by number, or one exact passage."""

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
    if edited == text:
        place = f"line {line} of {path}" if line is not None else f"old in {path}"
        raise ToolFailure(
            f"nothing changed: {place} reads like new already; give another place, or other text"
        )
    write_text(context.jail, path, edited)
    return ToolResult(text=f"edited {path}")


def _replace_line(path: str, text: str, line: int, new: str) -> str:
    lines = text.split("\n")  # the same line ends as in read_file: a form feed, for one, ends no line
    last = len(lines) - (lines[-1] == "")
    if not 1 <= line <= last:
        raise ToolFailure(f"{path} has lines 1 to {last}, not {line}")
    if line < len(lines):
        new = new.removesuffix("\n")
        if lines[line - 1].endswith("\r") and not new.endswith("\r"):
            new += "\r"
    lines[line - 1] = new
    return "\n".join(lines)


def _replace_passage(path: str, text: str, old: str, new: str) -> str:
    found = text.count(old) if old else 0
    if found != 1:
        raise ToolFailure(f"old must occur exactly once in {path}; it occurs {found} times")
    return text.replace(old, new)
