"""Times as other programs write them."""

from __future__ import annotations

from datetime import UTC, datetime

from nano_shared.refusal import Refused


def iso(seconds: float | None) -> str | None:
    """ISO 8601 in UTC; None for a moment that no calendar holds."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None


def unix(text: object, unknown: float, field: str) -> float:
    """Unix seconds of an ISO 8601 time; `unknown` where there is none. Raises Refused for what is no time."""
    if text is None:
        return unknown
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        raise Refused(field, f"{text!r:.60} is no ISO 8601 time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
