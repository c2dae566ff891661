"""A series as one line of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOISE = 1e-6
"""relative spread that is drawn flat: the last digits of a constant are no course"""


def sparkline(values: Sequence[float | None], *, width: int = 24) -> str:
    """The last `width` values between their least and greatest; a blank where there is no finite number."""
    shown = [v if v is not None and math.isfinite(v) else None for v in values[-width:]]
    known = [v for v in shown if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    if high / 2 - low / 2 <= _NOISE * max(abs(high), abs(low)):
        return "".join(" " if v is None else _BLOCKS[0] for v in shown)
    # halved before subtracting, so that the span of huge numbers stays finite
    span = high / 2 - low / 2
    top = len(_BLOCKS) - 1
    return "".join(" " if v is None else _BLOCKS[round((v / 2 - low / 2) / span * top)] for v in shown)
