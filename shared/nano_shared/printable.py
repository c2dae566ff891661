"""Text that somebody else made, as it may be shown: nothing in it drives a terminal, hides, or has no end.

`printable` is for a text. `guard_streams` does the same for whatever a command writes to its streams, by
whatever means, and `console.Console` for what it prints with style.
"""

from __future__ import annotations

import io
import sys
import unicodedata

MOST = 20_000
"""characters that a person is shown of one text; --json and the log have all of them"""
_DRIVES_OR_HIDES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""letters and marks by category that show nothing"""


def printable(text: str, most: int | None = MOST) -> str:
    """With control, direction, invisible and unassigned characters written out; newlines and tabs stay.

    What is written out is as JSON would have it, so JSON stays what it was. What is longer than `most`
    characters is cut to that, and says how long it was; twice does no more than once.
    """
    if most is None:
        return _written_out(text)
    shown = _written_out(text[:most])
    if len(text) <= most and len(shown) <= most:
        return shown
    told = f"... (cut, of {len(text)} characters)"
    return shown[: most - len(told)] + told


def one_line(text: str, most: int) -> str:
    """The beginning of a text on one line."""
    return printable(" ".join(text[: 10 * most].split()), most)


def _written_out(text: str) -> str:
    return "\n".join(line if line.isprintable() else _line(line) for line in text.split("\n"))


def _line(text: str) -> str:
    return "".join(c if c == "\t" or _shown(c) else _escaped(c) for c in text)


def _shown(char: str) -> bool:
    return unicodedata.category(char) not in _DRIVES_OR_HIDES and char not in _BLANK


def _escaped(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at] << 8 | units[at + 1]:04x}" for at in range(0, len(units), 2))


class GuardedStream(io.TextIOWrapper):
    """A stream whose text cannot drive the terminal, whoever writes it."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        stream.flush()
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",  # a name of a file may be no text at all
            newline="",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self.styled = stream
        """for a console, which has seen to its text itself"""
        stream.reconfigure(errors="backslashreplace")

    def __del__(self) -> None:
        """Leave the stream underneath open, which others write to."""

    def write(self, text: str, /) -> int:
        # a bar of progress goes back to where its line begins
        bar = "\r" if text.startswith("\r") and self.isatty() else ""
        super().write(bar + _written_out(text[len(bar) :]))
        return len(text)


def guard_streams() -> None:
    """Let standard output and standard error of this process write out what drives a terminal."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))
