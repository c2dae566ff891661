"""Redaction: removes secrets from what is stored and exported, and keeps every token in its place.

`scrub_text` is for a text, `scrub_trajectory` for a run, `scrub_blob` and `scrub_snapshot` for files.
`store.RedactingStore` is a log that redacts on write. docs/redaction.md says what is found, and what is not.
"""

from nano_shared.redact.patterns import Known
from nano_shared.redact.redactor import MARKER, RedactConfig, Redactor, Span, scrub_bytes, scrub_snapshot
from nano_shared.redact.trajectory import scrub_trajectory
from nano_shared.types import REDACTED_ID

__all__ = [
    "MARKER",
    "REDACTED_ID",
    "Known",
    "RedactConfig",
    "Redactor",
    "Span",
    "scrub_bytes",
    "scrub_snapshot",
    "scrub_text",
    "scrub_trajectory",
]


def scrub_text(text: str, redactor: Redactor | None = None) -> tuple[str, tuple[Span, ...]]:
    """The text with a marker for each secret, and the spans of the secrets in the given text."""
    return (redactor or Redactor()).scrub(text)
