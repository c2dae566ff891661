"""Repetition: detects that the end of an answer is one period over and over, token by token."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable

LONGEST = 400
"""tokens of a period"""
TIMES = 3
"""how often a period must be there"""
LEAST = 96
"""tokens that must repeat, whatever the period"""
_WORD = re.compile(r"\w+|\s+|[^\w\s]")


class Repetition:
    """Reads the tokens of one answer. A step costs as many comparisons as its token occurred among the last
    `LONGEST`."""

    def __init__(self) -> None:
        self.found = False
        self._read = 0
        self._places: dict[Hashable, deque[int]] = {}
        """of each token: where it stood, as far as a period reaches"""
        self._matching: dict[int, int] = {}
        """period -> how many of the last tokens equal those a period before them"""
        self._unfinished = ""

    def take(self, token: Hashable) -> bool:
        """Read a token. Returns `found`: whether a period up to it is there `TIMES` times, and `LEAST`
        tokens long."""
        places = self._places.setdefault(token, deque(maxlen=LONGEST))
        while places and self._read - places[0] > LONGEST:
            places.popleft()
        periods = [self._read - place for place in places]
        self._matching = {period: self._matching.get(period, 0) + 1 for period in periods}
        places.append(self._read)
        self._read += 1
        self.found = self.found or any(
            matching + period >= max(TIMES * period, LEAST) for period, matching in self._matching.items()
        )
        return self.found

    def take_text(self, text: str) -> bool:
        """As `take`, of an answer whose tokens are unknown: its words and signs count as tokens."""
        *whole, self._unfinished = _WORD.findall(self._unfinished + text) or [""]
        for word in whole:
            self.take(word)
        return self.found
