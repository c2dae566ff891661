"""Text that somebody else made, as it may be shown on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Without control characters, so that it cannot drive the terminal; newlines and tabs stay."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
