"""A pattern of `re` that is tried only in texts in which RE2 finds it without its assertions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import re2

_ASSERTION = re.compile(r"\(\?<?[!=](?:[^()\[\]\\]|\\.|\[(?:[^\]\\]|\\.)*\])*\)|\\b")
_BOUND = re.compile(r"\{(\d+),\d+\}")
_REFERENCE = re.compile(r"\(\?P=\w+\)")


def loose(source: str) -> str:
    """A pattern for RE2 that matches somewhere in each text in which `source` does, and in others.

    `source` may hold no `\\s` outside of a negated set: spaces of Unicode are none to RE2.
    """
    return _BOUND.sub(r"{\1,}", _ASSERTION.sub("", _REFERENCE.sub(".", source)))


class Gated:
    """A compiled pattern, with the finds of `re` and most of RE2's speed; texts hold no lone surrogates."""

    def __init__(self, source: str, flags: int = 0, gate: str | None = None) -> None:
        self.pattern = re.compile(source, flags)
        multiline = "(?m)" if flags & re.MULTILINE else ""
        self._gate: Any = re2.compile(multiline + (loose(source) if gate is None else gate))

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        return self.pattern.finditer(text) if self._gate.search(text) else iter(())
