"""The tool `read_file`: shows a text file of the workspace with line numbers."""

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
