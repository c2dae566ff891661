"""The tools `read_file`, `write_file` and `edit_file`: a text file of the workspace, whole or by lines."""

from __future__ import annotations

from nano_coder.sandbox.protocol import Jail
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

LARGEST_TEXT = 8 << 20
"""bytes of a file that tools split into lines: an empty line takes ten times its size in memory"""


@tool()
def read_file(context: ToolContext, path: str, start: int = 1, end: int | None = None) -> ToolResult:
    """Show a text file, each line behind its number."""
    lines = read_text(context.jail, path).split("\n")
    if lines[-1] == "":
        lines.pop()
    if not lines:
        return ToolResult(text="[empty file]")
    last = len(lines) if end is None else min(end, len(lines))
    if not 1 <= start <= last:
        raise ToolFailure(
            f"{path} has lines 1 to {len(lines)}, not {start} to {last if end is None else end}"
        )
    return ToolResult(text="\n".join(f"{n}|{lines[n - 1]}" for n in range(start, last + 1)))


def read_text(jail: Jail, path: str) -> str:
    """A file of the workspace as text. Raises ToolFailure with a message that names the path."""
    try:
        data = jail.read(path)
        if len(data) > LARGEST_TEXT:
            raise ToolFailure(
                f"{path} holds {len(data)} bytes, over {LARGEST_TEXT}: read a part with a command"
            )
        return data.decode("utf-8")
    except FileNotFoundError:
        raise ToolFailure(f"no such file: {path}") from None
    except IsADirectoryError:
        raise ToolFailure(f"{path} is a directory") from None
    except OSError as problem:
        raise ToolFailure(f"cannot read {path}: {problem}") from None
    except UnicodeDecodeError:
        raise ToolFailure(f"{path} is not UTF-8 text") from None


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
