"""Finds secrets in text and puts markers in their place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from nano_shared.redact.known import Known
from nano_shared.redact.patterns import PATTERNS, assignments, random_looking

MARKER = re.compile(r"\[redacted:[a-z0-9\-]+\]")
_NAME = re.compile(r"[a-z0-9][a-z0-9\-]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LARGEST_PATTERN = 2000
"""instructions of its program"""
_MOST_WORK = 300_000_000
"""matches of configured patterns in a text times its characters: seconds"""
_FEWEST_MATCHES = 100
_MOST_ROUNDS = 8


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
            if compiled(pattern).search(""):
                raise ValueError(
                    f"{kind}: {pattern!r} matches the empty text, so everything would be a secret"
                )
        return value

    @field_validator("allow")
    @classmethod
    def _allowed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            compiled(pattern)
        return value


@cache
def compiled(pattern: str) -> Any:
    """A pattern of a configuration, which may be a stranger's: matching never backtracks.

    Raises ValueError for what is none, and for one whose every character would cost a long walk.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        found = re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as problem:
        said = problem.args[0].decode("utf-8", "replace") if isinstance(problem, re2.error) else problem
        raise ValueError(
            f"{pattern!r} is no regular expression ({said}); the syntax is RE2's, which looks neither ahead"
            " nor behind: mark what is secret with (?P<secret>...)"
        ) from None
    if found.programsize > _LARGEST_PATTERN:
        raise ValueError(f"{pattern!r} is too large a regular expression; repeat less in it")
    return found


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
        for _ in range(_MOST_ROUNDS):
            scrubbed, pieces = _render(text, spans)
            more = self.find(scrubbed, known)
            if not more:
                return scrubbed, tuple(spans)
            # a marker can complete what was no secret before it stood there; that is hidden as well
            spans = _merge([*spans, *(_back(span, pieces) for span in more)])
        # rules that eat on at their own markers would take a round for each character
        whole = Span(0, len(text), spans[0].kind)
        return f"[redacted:{whole.kind}]", (whole,)

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
        for kind, pattern in PATTERNS.items():
            for match in pattern.finditer(text):
                group = pattern.groupindex.get("secret", 0)
                if not self._allowed(match[group]) and not _variable(match[group]):
                    yield match.span(group), kind
        yield from self._configured(text)
        for match in assignments(text):
            if not self._allowed(match["secret"]):
                yield match.span("secret"), "assignment"
        for start, end in random_looking(text):
            if not self._allowed(text[start:end]):
                yield (start, end), "high-entropy"
        if known:
            for span in known.find(text):
                yield span, "repeated"

    def _configured(self, text: str) -> Iterator[tuple[tuple[int, int], str]]:
        """Matches of the configuration's own patterns; where they are too many, the text is hidden whole.

        One search is linear in the text, but each match begins another.
        """
        plain = _SURROGATE.sub("\ufffd", text) if self.config.patterns else ""
        left = max(_FEWEST_MATCHES, _MOST_WORK // max(1, len(text)))
        for kind, source in self.config.patterns.items():
            pattern = compiled(source)
            group = pattern.groupindex.get("secret", 0)
            for match in pattern.finditer(plain):
                left -= 1
                if left < 0:
                    yield (0, len(text)), kind
                    return
                if not self._allowed(match[group]) and not _variable(match[group]):
                    yield match.span(group), kind

    def _allowed(self, value: str) -> bool:
        plain = _SURROGATE.sub("\ufffd", value) if value and self.config.allow else value
        return not value or any(compiled(pattern).fullmatch(plain) for pattern in self.config.allow)


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
