"""Ids: content hashes of canonical JSON, run ids; and the base class of values that are hashed."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from typing import Any

from pydantic import BaseModel, ConfigDict


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(value: Any) -> str:
    """`sha256:<hex>` of bytes as they are, of text as UTF-8, of anything else as canonical JSON."""
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
    else:
        data = canonical_json(value).encode("utf-8", "surrogatepass")
    return "sha256:" + hashlib.sha256(data).hexdigest()


_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32, which sorts as the numbers do
_LENGTH = 16
_RANDOM_BITS = 32


def new_run_id() -> str:
    """A new run id that sorts by time: 48 bits of milliseconds, then 32 random bits."""
    number = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    digits = []
    for _ in range(_LENGTH):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))


class Value(BaseModel):
    """A frozen value that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
