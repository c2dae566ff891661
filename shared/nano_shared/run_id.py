"""Run ids: 16 lower-case base-32 characters that sort by the time they were made."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's, which sorts as its values do
_LENGTH = 16
_RANDOM_BITS = 32


def new_run_id() -> str:
    """48 bits of milliseconds, then 32 random bits."""
    number = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    digits = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
