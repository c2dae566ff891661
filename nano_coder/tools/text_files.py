"""The tools `read`, `read_file`, `write_file` and `edit_file`: text files of the workspace."""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nano_coder.sandbox.protocol import Jail
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, near_paths, tool

BOM = "\ufeff"
"""of a file's first line; it is no part of its text"""
LARGEST_TEXT = 8 << 20
"""bytes of a file that tools split into lines: an empty line takes ten times its size in memory"""


def encoding_of(data: bytes) -> tuple[str, str]:
    """Encoding and error handler by which bytes that are text become it, and the same bytes again.

    UTF-8, also with some bytes that are none; else Windows' or ISO's Latin 1, where each byte is a letter.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        return "utf-8-sig", "surrogateescape"
    text = data.decode("utf-8", "surrogateescape")
    wrong = sum("\udc80" <= char <= "\udcff" for char in set(text))
    right = sum(ord(char) > 127 for char in set(text)) - wrong
    if right >= wrong:
        return "utf-8", "surrogateescape"
    try:
        return ("cp1252" if data.decode("cp1252") != data.decode("latin-1") else "latin-1"), "strict"
    except UnicodeDecodeError:
        return "latin-1", "strict"


DECODING = inspect.getsource(encoding_of)
"""for programs that run in the jail"""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file's text, without its byte order mark, and what makes it bytes again."""

    text: str
    encoding: tuple[str, str] = ("utf-8", "surrogatepass")

    def edited(self, text: str) -> TextFile:
        return TextFile(text.removeprefix(BOM), self.encoding)

    def data(self, path: str) -> bytes:
        """Its bytes. Raises ToolFailure for a character that the file's encoding does not have."""
        try:
            return self.text.encode(*self.encoding)
        except UnicodeEncodeError as problem:
            char = self.text[problem.start]
            raise ToolFailure(
                f"{path} is {self.encoding[0]} text, which has no {char!r}: write it otherwise, or convert"
                " the file to UTF-8 first"
            ) from None


def read_text(jail: Jail, path: str) -> TextFile:
    """A text file of the workspace. Raises ToolFailure with a message that names the path."""
    try:
        data = jail.read(path)
    except FileNotFoundError:
        raise ToolFailure(f"no such file: {path}") from None
    except IsADirectoryError:
        raise ToolFailure(f"{path} is a directory") from None
    except OSError as problem:
        raise ToolFailure(f"cannot read {path}: {problem}") from None
    if len(data) > LARGEST_TEXT:
        raise ToolFailure(f"{path} holds {len(data)} bytes, over {LARGEST_TEXT}: read a part with a command")
    if b"\0" in data:
        raise ToolFailure(f"{path} is not UTF-8 text")
    encoding = encoding_of(data)
    return TextFile(data.decode(*encoding), encoding)


@tool()
def read_file(context: ToolContext, path: str, start: int = 1, end: int | None = None) -> ToolResult:
    """Show a text file, each line behind its number."""
    text = read_text(context.jail, path).text
    lines = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").split("\n")
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


@tool(body="content", mutates=True)
def write_file(context: ToolContext, path: str, content: str) -> ToolResult:
    """Create or replace a file."""
    try:
        old, near = read_text(context.jail, path), ""
    except ToolFailure:
        old, near = TextFile(""), _near_folder(context, path)
    if "\r" not in content and old.text.count("\r\n") == old.text.count("\n"):
        content = _ended(content, old.text)
    try:
        data = old.edited(content).data(path)
    except ToolFailure:
        data = TextFile(content).data(path)
    write_data(context.jail, path, data)
    return ToolResult(text=f"wrote {path}{near}")


def _near_folder(context: ToolContext, path: str) -> str:
    """Note that a file's folder is a new one, and of folders near it."""
    folder = posixpath.dirname(posixpath.normpath(path))
    if not folder or folder == "/":
        return ""
    try:
        context.jail.read(folder)
    except FileNotFoundError:
        near = near_paths(context, folder)
        return f"; {folder} is a new folder{near}" if near else ""
    except OSError:
        pass
    return ""


def write_data(jail: Jail, path: str, data: bytes) -> None:
    """Write a file of the workspace. Raises ToolFailure with a message that names the path."""
    try:
        jail.write(path, data)
    except OSError as problem:
        raise ToolFailure(f"cannot write {path}: {problem.strerror or problem}") from None


@tool(body="new", mutates=True)
def edit_file(
    context: ToolContext, path: str, new: str, line: int | None = None, old: str | None = None
) -> ToolResult:
    """Replace line number `line`, or the only occurrence of `old`, by `new`."""
    if (line is None) == (old is None):
        raise ToolFailure("give either line (a number) or old (a text that occurs once)")
    file = read_text(context.jail, path)
    if line is not None:
        edited = replace_line(path, file.text, line, new)
    else:
        edited = _replace_passage(path, file.text, (old or "").removeprefix(BOM), new.removeprefix(BOM))
    if edited == file.text:
        place = f"line {line} of {path}" if line is not None else f"old in {path}"
        raise ToolFailure(
            f"nothing changed: {place} reads like new already; give another place, or other text"
        )
    write_data(context.jail, path, file.edited(edited).data(path))
    return ToolResult(text=f"edited {path}")


def replace_line(path: str, text: str, line: int, new: str) -> str:
    """The text of a file with one line replaced. Raises ToolFailure for a line that it does not have."""
    lines = text.split("\n")  # the same line ends as in read_file: a form feed, for one, ends no line
    last = len(lines) - (lines[-1] == "")
    if not 1 <= line <= last:
        raise ToolFailure(f"{path} has lines 1 to {last}, not {line}")
    old = f"{lines[line - 1]}\n" if line < len(lines) else text
    new = _ended(new.removesuffix("\n").removesuffix("\r"), old)
    lines[line - 1] = f"{new}\r" if old.endswith("\r\n") and line < len(lines) else new
    return "\n".join(lines)


def _replace_passage(path: str, text: str, old: str, new: str) -> str:
    parts = old.replace("\r\n", "\n").split("\n")
    found = list(re.finditer("\r?\n".join(map(re.escape, parts)), text)) if old else []
    if len(found) != 1:
        raise ToolFailure(f"old must occur exactly once in {path}; it occurs {len(found)} times")
    (start, end), line_end = found[0].span(), text.find("\n", found[0].start())
    return text[:start] + _ended(new, text[start : line_end + 1]) + text[end:]


def _ended(new: str, old: str) -> str:
    """A text with CRLF for LF if the text that it replaces has CRLF."""
    return new.replace("\r\n", "\n").replace("\n", "\r\n") if "\r\n" in old else new


LINES, LETTERS, WIDTH = 400, 20_000, 2_000
"""of a page, and of a line"""
_READ = (
    DECODING
    + r"""
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
sample = file.read(1 << 23)
if b"\0" in sample[:8192]:
    sys.exit(f"{path} is no text; it holds {os.fstat(file.fileno()).st_size} bytes")
encoding, _ = encoding_of(sample[: sample.rfind(b"\n") + 1] or sample)
file.seek(0)
last, tail = 0, b"\n"
while chunk := file.read(1 << 20):
    last, tail = last + chunk.count(b"\n"), chunk[-1:]
last += tail != b"\n"
file.seek(0)
size, end = 0, offset - 1
for number, line in enumerate(itertools.islice(file, offset - 1, offset - 1 + limit), offset):
    text = line.decode("utf-8" if number > 1 and encoding == "utf-8-sig" else encoding, "backslashreplace")
    text = text.removesuffix("\n").removesuffix("\r")
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
)


@tool()
def read(context: ToolContext, path: str, offset: int = 1, limit: int = LINES) -> ToolResult:
    """Show a text file, each line behind its number, from line offset on, at most limit lines. Paths are
    relative to the workspace."""
    if offset < 1 or limit < 1:
        raise ToolFailure("offset and limit are numbers from 1 on")
    numbers = (offset, limit, LETTERS, WIDTH)
    return said_by(context, _READ, [path, *map(str, numbers)])


def said_by(context: ToolContext, program: str, argv: Sequence[str] = (), stdin: bytes = b"") -> ToolResult:
    """What a program of ours says in the jail. Raises ToolFailure with its last line where it fails."""
    execution = context.run_python(program, argv, isolated=True, stdin=stdin)
    if execution.exit_code != 0:
        lines = execution.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
        raise ToolFailure(lines[-1] if lines else "it did not finish")
    text = execution.stdout.decode("utf-8", "backslashreplace").rstrip("\n")
    return ToolResult(text=text, execution=execution)
