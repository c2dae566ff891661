"""Column types that give back exactly the value they were given, on every database."""

from __future__ import annotations

import json
import struct
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

_ESCAPED = "\x1bjson:"


class ExactText(sa.TypeDecorator[str]):
    """Text that may hold what databases refuse: NUL, and lone surrogates (bytes of non-UTF-8 file names).

    Such text, rare in practice, is stored as a marker and its JSON form; all other text as it is.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None or _plain(value):
            return value
        return _ESCAPED + json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is not None and value.startswith(_ESCAPED):
            return str(json.loads(value.removeprefix(_ESCAPED)))
        return value


class Json(sa.TypeDecorator[Any]):
    """JSON as text, readable where Unicode allows. Keeps the order of keys, infinities and large integers."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        text = json.dumps(value, ensure_ascii=False)
        return text if _plain(text) else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class Packed(sa.TypeDecorator[tuple[Any, ...]]):
    """A tuple of numbers as one blob: little-endian, `I` for uint32 ids, `d` for float64 log-probs.

    Log-probs are kept in float64 because a trajectory must come back equal to the one that was appended.
    """

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def process_bind_param(self, value: tuple[Any, ...] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else struct.pack(f"<{len(value)}{self.code}", *value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> tuple[Any, ...] | None:
        if value is None:
            return None
        count = len(value) // struct.calcsize(f"<{self.code}")
        return struct.unpack(f"<{count}{self.code}", value)


def _plain(text: str) -> bool:
    if "\0" in text or text.startswith(_ESCAPED):
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
