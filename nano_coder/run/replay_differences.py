"""Drift: differences between a logged action and its new execution, and their causes.

A text that is equal after removing clock times drifted by time; after removing process ids, addresses and
temporary names, by path or pid. What differs between two new executions drifted by randomness. The rest is
`other`: the machine, the tools or nano have changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    TIME = "time"
    RANDOMNESS = "randomness"
    PLACE = "path/pid"
    OTHER = "other"

    @property
    def expected(self) -> bool:
        """Whether a faithful execution may drift for this cause."""
        return self in (Cause.TIME, Cause.RANDOMNESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One difference between log and execution."""

    turn: int
    call: int | None
    """index within the turn; None for files that the whole turn left"""
    what: str
    """text, exit code, signal, timed out, ok, or a file's path"""
    cause: Cause
    logged: str
    """excerpt around the first difference"""
    now: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_EXCERPT, _BEFORE = 200, 20
"""characters of an excerpt, and how many of them before the difference"""
_DAYS = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_MONTHS = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_TIME = re.compile(
    "|".join(
        (
            r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?)?",
            r"\b\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?\b",
            rf"\b{_DAYS},? +(?:\d{{1,2}} +)?{_MONTHS}\b(?: +\d{{1,2}})?",
            rf"\b{_MONTHS} +\d{{1,2}}\b",
            r"\b1[6-9]\d{8}(?:\.\d+)?\b|\b1[6-9]\d{11}\b|\b1[6-9]\d{17}\b",  # unix time in s, ms and ns
            r"\b\d+m\d+(?:[.,]\d+)?s\b",
            r"\b\d+(?:\.\d+)?(?:e-?\d+)? ?(?:s|sec|secs|seconds?|ms|us|µs|ns|milliseconds?|usec|msec)\b",
        )
    )
)
_PLACE = re.compile(
    "|".join(
        (
            r"\b0x[0-9a-fA-F]{5,}\b",
            r"(?:/tmp|/var/tmp|/dev/shm|/run)/[^\s'\":,)]+",
            r"/proc/\d+",
            r"(?i:\bpid[ =:]+\d+|\bprocess[ =:]+\d+)",
            r"\[\d+\]|(?<=: line )\d+: +\d+|\btmp[a-z0-9_]{8}\b",
            r"\buid=\d+[^\n]*",
        )
    )
)
_CLOCK_WORDS = re.compile(r"\b(?:time|date|datetime|clock|perf_counter|monotonic|uptime|now)\b")


def explained(logged: str, now: str) -> Cause | None:
    """The cause that the two texts themselves show, or None."""
    if _TIME.sub("<time>", logged) == _TIME.sub("<time>", now):
        return Cause.TIME
    if _blotted(logged) == _blotted(now):
        return Cause.PLACE
    return None


def excerpts(logged: str, now: str) -> tuple[str, str]:
    """Excerpts of the two texts around their first difference."""
    pairs = zip(logged, now, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(logged), len(now)))
    start = max(0, first - _BEFORE)
    return logged[start : start + _EXCERPT], now[start : start + _EXCERPT]


def cause_of(logged: str, now: Sequence[str], action: str) -> Cause:
    """The cause of a difference; `now` are the texts of one or more new executions."""
    seen = explained(logged, now[0])
    if seen is not None:
        return seen
    if len(set(now)) > 1:
        return Cause.TIME if _CLOCK_WORDS.search(action) else Cause.RANDOMNESS
    return Cause.OTHER


def _blotted(text: str) -> str:
    return _PLACE.sub("<place>", _TIME.sub("<time>", text))
