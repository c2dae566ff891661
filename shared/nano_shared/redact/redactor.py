"""Finds secrets in text and puts markers in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from nano_shared.redact.entropy import random_looking
from nano_shared.redact.known import Known
from nano_shared.redact.patterns import PATTERNS, assignments

MARKER = re.compile(r"\[redacted:[a-z0-9\-]+\]")
_NAME = re.compile(r"[a-z0-9][a-z0-9\-]*")


class RedactConfig(BaseModel):
    """The table `redact` of nano.toml. `redact = "write"` is short for its `on`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on: Literal["off", "write"] = "off"
    """write: what the log stores is redacted; exports have a flag of their own"""
    patterns: dict[str, str] = {}
    """kind -> regular expression of more secrets; its group `secret`, if any, is what is hidden"""
    allow: tuple[str, ...] = ()
    """regular expressions; what one of them matches whole is no secret"""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: object) -> object:
        return {"on": value} if isinstance(value, str) else value

    @field_validator("patterns")
    @classmethod
    def _kinds(cls, value: dict[str, str]) -> dict[str, str]:
        for kind, pattern in value.items():
            if not _NAME.fullmatch(kind):
                raise ValueError(f"{kind!r} is no name of a kind; use lower-case letters, digits and dashes")
            if _compiled(pattern).search(""):
                raise ValueError(
                    f"{kind}: {pattern!r} matches the empty text, so everything would be a secret"
                )
        return value

    @field_validator("allow")
    @classmethod
    def _allowed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            _compiled(pattern)
        return value


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise ValueError(f"{pattern!r} is no regular expression ({problem})") from None


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A secret in a text: characters [start, end)."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class Redactor:
    """Patterns of common secrets, random-looking strings, and the user's own rules. Thread-safe."""

    config: RedactConfig = RedactConfig()  # noqa: RUF009 (frozen, so one is enough)

    def scrub(self, text: str, known: Known | None = None) -> tuple[str, tuple[Span, ...]]:
        """The text with a marker `[redacted:KIND]` for each secret, and where they were in the given text.

        Text without secrets comes back as it is, and so does what was scrubbed before.
        """
        spans: list[Span] = []
        while True:
            scrubbed, pieces = _render(text, spans)
            more = self.find(scrubbed, known)
            if not more:
                return scrubbed, tuple(spans)
            # a marker can complete what was no secret before it stood there; that is hidden as well
            spans = _merge([*spans, *(_back(span, pieces) for span in more)])

    def find(self, text: str, known: Known | None = None) -> list[Span]:
        """Every secret in a text, in order and apart; with `known`, also wherever a known one comes again."""
        markers = [match.span() for match in MARKER.finditer(text)]
        found = [Span(*span, kind) for span, kind in self._candidates(text, known)]
        return _merge(
            span for span in found if not any(a <= span.start and span.end <= b for a, b in markers)
        )

    def secrets(self, text: str) -> Iterator[str]:
        """The secrets in a text, as they are."""
        return (text[span.start : span.end] for span in self.find(text))

    def _candidates(self, text: str, known: Known | None) -> Iterator[tuple[tuple[int, int], str]]:
        for kind, pattern in self._patterns.items():
            for match in pattern.finditer(text):
                group = "secret" if "secret" in pattern.groupindex else 0
                if not self._allowed(match[group]) and not _variable(match[group]):
                    yield match.span(group), kind
        for match in assignments(text):
            if not self._allowed(match["secret"]):
                yield match.span("secret"), "assignment"
        for start, end in random_looking(text):
            if not self._allowed(text[start:end]):
                yield (start, end), "high-entropy"
        if known:
            for span in known.find(text):
                yield span, "repeated"

    @cached_property
    def _patterns(self) -> dict[str, re.Pattern[str]]:
        return PATTERNS | {kind: re.compile(pattern) for kind, pattern in self.config.patterns.items()}

    @cached_property
    def _allow(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(re.compile, self.config.allow))

    def _allowed(self, value: str) -> bool:
        return not value or any(pattern.fullmatch(value) for pattern in self._allow)


def _variable(value: str) -> bool:
    """Whether it stands for a secret that is elsewhere: ${PASSWORD}, {password}, <password>, %s, ****."""
    return value[0] in "$<{%" or not value.strip("*x.") or MARKER.fullmatch(value) is not None


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans as one, of the kind of the first."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end), last.kind)
        else:
            merged.append(span)
    return merged


_Piece = tuple[int, int, int, int, bool]
"""start and end in the rendered text, start and end in the original, and whether it is a marker"""


def _render(text: str, spans: list[Span]) -> tuple[str, list[_Piece]]:
    parts: list[str] = []
    pieces: list[_Piece] = []
    written = read = 0

    def put(part: str, start: int, end: int, marker: bool) -> None:
        nonlocal written
        parts.append(part)
        pieces.append((written, written + len(part), start, end, marker))
        written += len(part)

    for span in spans:
        put(text[read : span.start], read, span.start, False)
        put(f"[redacted:{span.kind}]", span.start, span.end, True)
        read = span.end
    put(text[read:], read, len(text), False)
    return "".join(parts), pieces


def _back(span: Span, pieces: list[_Piece]) -> Span:
    """A span of the rendered text in the original; a marker that it touches counts whole."""
    touched = [piece for piece in pieces if piece[0] < span.end and span.start < piece[1]]
    first, last = touched[0], touched[-1]
    start = first[2] if first[4] else first[2] + max(0, span.start - first[0])
    end = last[3] if last[4] else last[2] + span.end - last[0]
    return Span(start, end, span.kind)
