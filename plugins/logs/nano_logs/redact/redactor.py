"""The redactor: finds secrets in text and replaces them by markers."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from nano_logs.redact.config import RedactConfig, compiled
from nano_logs.redact.encodings import DEEPEST, encoded_parts, file_form
from nano_logs.redact.patterns import Known, assignments, placed_secrets, random_looking, vendor_secrets
from nano_shared.snapshot import BlobStore, EntryKind, load, make_snapshot, save
from nano_shared.types import MARKER

_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_WORK = 300_000_000
"""bound on the matches of configured patterns times the text's length; some seconds"""
_FEWEST_MATCHES = 100
_MOST_ROUNDS = 8
_MOST_SEEN = 10_000
"""texts whose finds are remembered"""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A secret in a text: characters [start, end)."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class Redactor:
    """Finds patterns of common secrets, random-looking strings, and the user's own patterns. Thread-safe."""

    config: RedactConfig = RedactConfig()  # noqa: RUF009 (frozen, so one is enough)
    _seen: dict[bytes, tuple[Span, ...]] = field(default_factory=dict, compare=False, repr=False)
    """what was found in texts, by their hash: a run's texts are learnt, scrubbed, and looked at again"""

    def scrub(self, text: str, known: Known | None = None) -> tuple[str, tuple[Span, ...]]:
        """The text with a marker `[redacted:KIND]` for each secret, and the spans in the given text. A text
        without secrets, or redacted before, is returned unchanged."""
        spans: list[Span] = []
        for _ in range(_MOST_ROUNDS):
            scrubbed, pieces = _render(text, spans)
            more = self.find(scrubbed, known)
            if not more:
                return scrubbed, tuple(spans)
            # a marker can complete a pattern that did not match before; that match is hidden too
            spans = _merge([*spans, *(_back(span, pieces) for span in more)])
        # rules that match their own markers would take a round for each character
        whole = Span(0, len(text), spans[0].kind)
        return f"[redacted:{whole.kind}]", (whole,)

    def find(self, text: str, known: Known | None = None) -> list[Span]:
        """Every secret in a text, in order, without overlaps; with `known`, also occurrences of known
        ones. A secret in an encoding is its whole encoded text."""
        return self._found(text, known, DEEPEST)

    def _found(self, text: str, known: Known | None, depth: int) -> list[Span]:
        # the patterns' engine takes no lone surrogates; offsets stay
        plain = text if text.isascii() else _SURROGATE.sub("\ufffd", text)
        found = list(self._own(plain))
        for (start, end), decoded in encoded_parts(plain) if depth else ():
            if inner := self._found(decoded, known, depth - 1):
                found.append(Span(start, end, f"encoded-{inner[0].kind}".removeprefix("encoded-encoded-")))
        found += [Span(*span, "repeated") for span in known.find(text)] if known else []
        markers = [match.span() for match in MARKER.finditer(text)] if found else []
        inside = (any(a <= span.start and span.end <= b for a, b in markers) for span in found)
        return _merge(span for span, hidden in zip(found, inside, strict=True) if not hidden)

    def secrets(self, text: str) -> Iterator[str]:
        """The texts of the secrets in a text."""
        return (text[span.start : span.end] for span in self.find(text))

    def _own(self, text: str) -> tuple[Span, ...]:
        """What is found in a text as it stands, not decoded; remembered by the text's hash."""
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        spans = self._seen.get(key)
        if spans is None:
            spans = tuple(Span(*span, kind) for span, kind in self._candidates(text))
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = spans
        return spans

    def _candidates(self, text: str) -> Iterator[tuple[tuple[int, int], str]]:
        yield from self._configured(text)
        for (start, end), kind in itertools.chain(
            placed_secrets(text),
            vendor_secrets(text),
            ((span, "assignment") for span in assignments(text)),
            ((span, "high-entropy") for span in random_looking(text)),
        ):
            if not self._allowed(text[start:end]) and not _variable(text[start:end]):
                yield (start, end), kind

    def _configured(self, text: str) -> Iterator[tuple[tuple[int, int], str]]:
        """Matches of the configured patterns; if there are too many, the whole text is hidden. One search is
        linear in the text, but each match starts another."""
        left = max(_FEWEST_MATCHES, _MOST_WORK // max(1, len(text)))
        for kind, source in self.config.patterns.items():
            pattern = compiled(source)
            group = pattern.groupindex.get("secret", 0)
            for match in pattern.finditer(text):
                left -= 1
                if left < 0:
                    yield (0, len(text)), kind
                    return
                if not self._allowed(match[group]) and not _variable(match[group]):
                    yield match.span(group), kind

    def _allowed(self, value: str) -> bool:
        return not value or any(compiled(pattern).fullmatch(value) for pattern in self.config.allow)


def _variable(value: str) -> bool:
    """Whether it is a placeholder: ${PASSWORD}, {password}, <password>, %s, ****."""
    return value[0] in "$<{%" or not value.strip("*x.") or MARKER.fullmatch(value) is not None


def _merge(spans: Iterable[Span]) -> list[Span]:
    """Overlapping spans merged into one, of the kind of the first."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        if merged and span.start < merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end), last.kind)
        else:
            merged.append(span)
    return merged


_TextPiece = tuple[int, int, int, int, bool]
"""start and end in the redacted text, start and end in the original, whether it is a marker"""


def _render(text: str, spans: list[Span]) -> tuple[str, list[_TextPiece]]:
    parts: list[str] = []
    pieces: list[_TextPiece] = []
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


def _back(span: Span, pieces: list[_TextPiece]) -> Span:
    """The span in the original of a span in the redacted text; includes every marker that it touches."""
    touched = [piece for piece in pieces if piece[0] < span.end and span.start < piece[1]]
    first, last = touched[0], touched[-1]
    start = first[2] if first[4] else first[2] + max(0, span.start - first[0])
    end = last[3] if last[4] else last[2] + span.end - last[0]
    return Span(start, end, span.kind)


def scrub_bytes(data: bytes, redactor: Redactor, known: Known | None = None) -> bytes:
    """A file with markers for its secrets; the same object if there are none. Files that are no text are
    searched byte by byte, so that secrets in binary files are found too; such a file is then damaged, which
    is better than leaking a key."""
    text, encode = file_form(data)
    # a zero byte ends a text in a binary file
    spans = redactor.scrub(text.replace("\0", "\n"), known)[1]
    return encode(_render(text, list(spans))[0]) if spans else data


def scrub_snapshot(
    snapshot: str, source: BlobStore, target: BlobStore, redactor: Redactor | None = None,
    known: Known | None = None,
) -> str:  # fmt: skip
    """Copy a snapshot with the secrets of its files and link targets redacted; returns its id in `target`.
    File names stay, since tools and diffs refer to them. Raises LogError if a file is missing."""
    redactor, known = redactor or Redactor(), known or Known()
    entries = []
    for entry in load(snapshot, source).entries:
        content = entry.content
        if content is not None and entry.kind is EntryKind.FILE:
            content = target.put(scrub_bytes(source.get(content), redactor, known))
        elif content is not None:
            content = redactor.scrub(content, known)[0]
        entries.append(replace(entry, content=content))
    return save(make_snapshot(entries), target)
