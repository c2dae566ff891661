"""Secrets that were recognised somewhere in a run, wherever they come again, whole or in part."""

from __future__ import annotations

import re
from collections.abc import Iterable

from nano_shared.redact.patterns import entropy

SHORTEST = 6
"""characters of a secret that is looked for elsewhere"""
FRAGMENT = 8
"""characters of a part of a long secret that give it away"""
_LONG = 16
_VARIED = 2.0
"""bits a character of a fragment: rows of one letter or of dashes are nobody's secret"""


class Known:
    """Grows as secrets are found. A word of one class of characters is not looked for: `postgres` as a
    password would take every other `postgres` with it."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._whole: set[str] = set()
        self._fragments: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.add(secrets)

    def __bool__(self) -> bool:
        return bool(self._whole)

    def add(self, secrets: Iterable[str]) -> None:
        for secret in secrets:
            if secret in self._whole or not _telling(secret):
                continue
            self._whole.add(secret)
            self._pattern = None
            if len(secret) >= _LONG:
                parts = (secret[i : i + FRAGMENT] for i in range(len(secret) - FRAGMENT + 1))
                self._fragments |= {part for part in parts if entropy(part) >= _VARIED}

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where a known secret stands, or eight characters or more of one that has at least sixteen."""
        if not self._whole:
            return []
        if self._pattern is None:
            longest_first = sorted(self._whole, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        found = [match.span() for match in self._pattern.finditer(text)]
        if self._fragments:
            found += [
                (i, i + FRAGMENT)
                for i in range(len(text) - FRAGMENT + 1)
                if text[i : i + FRAGMENT] in self._fragments
            ]
        return found


def _telling(secret: str) -> bool:
    if len(secret) < SHORTEST or "[redacted:" in secret:
        return False
    classes = (str.islower, str.isupper, str.isdigit, lambda c: not c.isalnum())
    return len(secret) >= _LONG or sum(any(map(of, secret)) for of in classes) >= 2
