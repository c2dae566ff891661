"""Text of a model or a program, made safe to look at: nothing in it is invisible or turns the page around."""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t"


def visible(text: str) -> str:
    """The text with control, direction and other invisible characters, and lone surrogates, written out.

    Escaping of HTML is the template's; this is about what HTML would pass on: a NUL, an escape sequence, or a
    character that shows the rest of a line backwards.
    """
    return "".join(char if _shown(char) else _written(char) for char in text)


def _shown(char: str) -> bool:
    return char in _KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _written(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return f"\\u{{{code:x}}}"
