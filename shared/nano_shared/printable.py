"""Makes untrusted text safe to show: escapes characters that drive a terminal or hide, and bounds its length.

`printable` does so for a text, `guard_streams` for everything that a command writes to its streams, and
`command_line.Console` for styled output.
"""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

IN_USER_CODE: ContextVar[bool] = ContextVar("IN_USER_CODE", default=False)
"""True while a function of users runs (`extensions.py`): what it prints goes to stderr"""
MOST = 20_000
"""characters of one text that are shown to a person; --json and the log have all of it"""
_DRIVES_OR_HIDES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""letters and marks, by category, that are displayed as blanks"""


def printable(text: str, most: int | None = MOST) -> str:
    """The text with control, bidirectional, invisible and unassigned characters escaped; newlines and tabs
    stay.

    Escapes are those of JSON, so JSON stays valid. A text longer than `most` characters is cut, with a note
    of its length. Idempotent.
    """
    if most is None:
        return _written_out(text)
    shown = _written_out(text[:most])
    if len(text) <= most and len(shown) <= most:
        return shown
    note = f"... (cut, of {len(text)} characters)"
    return shown[: most - len(note)] + note


_SEQUENCE = re.compile(
    r"\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # OSC: titles and links
    r"|\x1b[PX^_][^\x1b]*(?:\x1b\\)?"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, the cursor
    r"|\x1b[ -/]*[0-~]?|\x07"
)
_CLEARED_LINE = re.compile(r"(?:\r|^)\x1b\[0?K|\x1b\[2K", re.MULTILINE)
_DRAWN = re.compile(r"[\x1b\x9b\r\b\x07]")


def terminal_text(text: str) -> str:
    """What a terminal shows in the end: no escape sequences, of each line the last frame that a carriage
    return began, and no characters that a backspace took back. Idempotent."""
    if not _DRAWN.search(text):
        return text
    text = _SEQUENCE.sub("", _CLEARED_LINE.sub("\r \r", text))
    return "\n".join(_last_frame(line) if "\r" in line or "\b" in line else line for line in text.split("\n"))


def _last_frame(line: str) -> str:
    frames = [frame for frame in line.split("\r") if frame]
    shown: list[str] = []
    for char in frames[-1] if frames else "":
        if char != "\b":
            shown.append(char)
        elif shown:
            shown.pop()
    return "".join(shown).rstrip(" ") if len(frames) > 1 else "".join(shown)


def one_line(text: str, most: int) -> str:
    """The beginning of a text on one line."""
    return printable(" ".join(text[: 10 * most].split()), most)


def _written_out(text: str) -> str:
    return "\n".join(line if line.isprintable() else _line(line) for line in text.split("\n"))


def _line(text: str) -> str:
    return "".join(c if c == "\t" or _is_printable(c) else _escaped(c) for c in text)


def _is_printable(char: str) -> bool:
    return unicodedata.category(char) not in _DRIVES_OR_HIDES and char not in _BLANK


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


class GuardedStream(io.TextIOWrapper):
    """A text stream that escapes what could drive the terminal; stdout has no prints of users' code."""

    def __init__(self, stream: io.TextIOWrapper, *, main_alone: bool = False) -> None:
        """`main_alone`: what other threads print goes to stderr too."""
        stream.flush()
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",  # a file name may be no valid text
            newline="",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self.styled = stream
        """for a console, which has escaped its text itself"""
        self._main_alone = main_alone
        stream.reconfigure(errors="backslashreplace")

    def __del__(self) -> None:
        """Does nothing: the stream underneath stays open for others."""

    def write(self, text: str, /) -> int:
        if self is sys.stdout and self._is_users():
            return sys.stderr.write(text)
        # a progress bar returns to the beginning of its line
        bar = "\r" if text.startswith("\r") and self.isatty() else ""
        super().write(bar + _written_out(text[len(bar) :]))
        return len(text)

    def is_stdout(self) -> bool:
        """True if it writes to the process's standard output, which a caller in Python may have replaced."""
        try:
            return self.fileno() == 1
        except io.UnsupportedOperation:
            return False

    def _is_users(self) -> bool:
        other = self._main_alone and threading.current_thread() is not threading.main_thread()
        return IN_USER_CODE.get() or other


@contextmanager
def stdout_for_json() -> Iterator[None]:
    """Within the block stdout holds what the main thread of ours prints: the prints of users' threads,
    programs and libraries go to stderr."""
    before = sys.stdout
    if not isinstance(before, GuardedStream) or not before.is_stdout():
        yield
        return
    before.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with open(kept, "w", encoding=before.encoding, newline="") as file:
        sys.stdout = ours = GuardedStream(file, main_alone=True)
        try:
            yield
        finally:
            ours.flush()
            sys.stdout = before
            os.dup2(kept, 1)


def guard_streams() -> None:
    """Make standard output and standard error of this process escape what could drive the terminal.

    A closed stream becomes one that takes or gives nothing, so that no file of ours gets its number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so usually this one
            setattr(sys, name, os.fdopen(null, "r" if number == 0 else "w"))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


def without_password(url: str) -> str:
    """An address to show: the password of a database's URL is replaced."""
    url = re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", url)
