"""Content hashing: canonical JSON and algorithm-tagged digests."""

from __future__ import annotations

import hashlib
import json
from typing import Any


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
