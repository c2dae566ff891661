"""The tool `read`: shows a page of a text file, of any size."""

from __future__ import annotations

from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

LINES, LETTERS, WIDTH = 400, 20_000, 2_000
"""of a page, and of a line"""
_PROGRAM = r"""
import itertools, os, stat, sys

path, offset, limit, letters, width = sys.argv[1], *map(int, sys.argv[2:])
try:
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        sys.exit(f"{path} is a directory; glob lists its files")
    if not stat.S_ISREG(mode):
        sys.exit(f"{path} is no regular file")
    file = open(path, "rb")
except OSError as problem:
    sys.exit(f"no such file: {path}" if problem.errno == 2 else f"cannot read {path}: {problem.strerror}")
if b"\0" in file.read(8192):
    sys.exit(f"{path} is no text; it holds {os.fstat(file.fileno()).st_size} bytes")
file.seek(0)
last, tail = 0, b"\n"
while chunk := file.read(1 << 20):
    last, tail = last + chunk.count(b"\n"), chunk[-1:]
last += tail != b"\n"
file.seek(0)
size, end = 0, offset - 1
for number, line in enumerate(itertools.islice(file, offset - 1, offset - 1 + limit), offset):
    text = line.decode("utf-8", "backslashreplace").removesuffix("\n").removesuffix("\r")
    if len(text) > width:
        text = f"{text[:width]} [and {len(text) - width} more characters]"
    size += len(text) + 1
    if size > letters and number > offset:
        break
    print(f"{number}|{text}")
    end = number
if not last:
    print("[empty file]")
elif offset > last:
    sys.exit(f"{path} has lines 1 to {last}, and no line {offset}")
elif end < last:
    print(f"[lines {offset} to {end} of {last}; offset={end + 1} shows more]")
"""


@tool()
def read(context: ToolContext, path: str, offset: int = 1, limit: int = LINES) -> ToolResult:
    """Show a text file, each line behind its number, from line offset on, at most limit lines. Paths are
    relative to the workspace."""
    if offset < 1 or limit < 1:
        raise ToolFailure("offset and limit are numbers from 1 on")
    numbers = (offset, limit, LETTERS, WIDTH)
    return said_by(context, _PROGRAM, [path, *map(str, numbers)])


def said_by(context: ToolContext, program: str, argv: list[str]) -> ToolResult:
    """What a program of ours says in the jail. Raises ToolFailure with its last line where it fails."""
    execution = context.run_python(program, argv, isolated=True)
    if execution.exit_code != 0:
        lines = execution.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
        raise ToolFailure(lines[-1] if lines else "it did not finish")
    text = execution.stdout.decode("utf-8", "backslashreplace").rstrip("\n")
    return ToolResult(text=text, execution=execution)
