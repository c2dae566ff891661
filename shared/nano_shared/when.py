"""Times as people write them on a command line."""

from __future__ import annotations

import re
from datetime import datetime

from nano_shared.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_when(text: str, *, now: float, option: str = "--since") -> float:
    """Unix seconds of a date (2026-11-21), a time (2026-11-21T09:30, in local time unless it says), unix
    seconds, or so long ago: 90m, 12h, 7d, 2w.

    Raises UsageError for anything else.
    """
    ago = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if ago:
        return now - int(ago[1]) * _SECONDS[ago[2]]
    if re.fullmatch(r"\d{9,}(\.\d+)?", text.strip()):
        return float(text)
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{option} {text!r} is no time; write a date (2026-11-21), a time (2026-11-21T09:30), or so long"
            " ago (90m, 12h, 7d, 2w)"
        ) from None
