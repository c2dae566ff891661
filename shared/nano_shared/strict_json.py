"""Strict JSON: no key twice, no number outside JSON, and errors that name the line and field."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from nano_shared.errors import Refused

Row = dict[str, Any]
GZIP = b"\x1f\x8b"
"""what a file begins with that gzip has packed"""
DEEPEST = 200
"""levels of nesting; pydantic writes no more than 255"""
Model = TypeVar("Model", bound=BaseModel)


def parse_json(text: str, *, finite: bool = True) -> Any:
    """A JSON value. Raises Refused for invalid JSON, a repeated key and too deep nesting; if `finite`, for
    NaN and infinities too."""
    numbers: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite_float} if finite else {}
    try:
        value = json.loads(text, object_pairs_hook=_unique, **numbers)
        # most texts have too few brackets to be so deep, and are not walked through
        if text.count("[") + text.count("{") > DEEPEST and _is_deeper(value, DEEPEST):
            raise RecursionError
        return value
    except RecursionError:
        raise Refused("row", f"is nested too deeply; {DEEPEST} levels are the most") from None
    except ValueError as problem:
        raise Refused("row", f"is not JSON: {problem}") from None


def json_lines(path: Path, *, finite: bool = True) -> Iterator[tuple[str, Row]]:
    """Every row of a JSON lines file with its place, `file:line`, one in memory at a time.

    Raises Refused for the first line that is no JSON object, with the place and the field.
    """
    for where, line in text_lines(path):
        with at_place(where):
            row = json_object(line, finite=finite)
        yield where, row


def text_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Every non-blank line of a file, which gzip may have packed, with its place, `file:line`. Raises Refused
    if one is not UTF-8."""
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == GZIP
            for number, line in enumerate(gzip.GzipFile(fileobj=file) if packed else file, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    with at_place(where):
                        text = decoded(line)
                    yield where, text
    except (OSError, EOFError, zlib.error) as problem:
        why = getattr(problem, "strerror", None) or problem
        raise Refused(str(path), f"cannot be read: {why}") from None


@contextmanager
def at_place(where: str, joint: str = ": ") -> Iterator[None]:
    """Puts the place before the field of any Refused raised in the block."""
    try:
        yield
    except Refused as problem:
        raise Refused(f"{where}{joint}{problem.field}", problem.why) from None


def at_field(path: str) -> AbstractContextManager[None]:
    """Puts the path of the object before the field of any Refused raised in the block."""
    return at_place(path, ".")


def json_object(text: str, *, finite: bool = True) -> Row:
    """A JSON object. Raises Refused for anything else."""
    item = parse_json(text, finite=finite)
    if not isinstance(item, dict):
        raise Refused("row", f"must be a JSON object, not {type(item).__name__}")
    return item


def decoded(data: bytes) -> str:
    """UTF-8 text without a byte order mark. Raises Refused."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        why = f"is not UTF-8: {problem.reason} at byte {problem.start}"
        raise Refused("row", f"{why}; save it as UTF-8") from None


def to_json(value: Any) -> str:
    """One line of JSON. Raises Refused for values that JSON or UTF-8 cannot represent."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise Refused("task", "holds half of a surrogate pair, which no UTF-8 file carries") from None
    except (ValueError, RecursionError):
        raise Refused("task", "holds NaN, infinity or too deep a nesting, which JSON cannot carry") from None
    return text


def validated(model: type[Model], value: Any, at: str = "") -> Model:
    """A value validated as a pydantic model. Raises Refused with the first invalid field."""
    with refusing_invalid(at, ", ".join(model.model_fields)):
        return model.model_validate(value)


@contextmanager
def refusing_invalid(at: str = "", fields: str = "") -> Iterator[None]:
    """Turns a ValidationError in the block into Refused with the first invalid field, and with the `fields`
    that there are where it is missing or none of them."""
    try:
        yield
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join([*([at] if at else []), *(str(part) for part in first["loc"])])
        about = first["type"] in ("missing", "extra_forbidden") and len(first["loc"]) == 1 and fields
        why = first["msg"].removeprefix("Value error, ") + (f"; the fields are {fields}" if about else "")
        raise Refused(field or "row", why) from None


def text_field(row: Row, name: str) -> str:
    """A field that must hold text. Raises Refused if it is missing, blank or something else."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(name, "is missing" if name not in row else f"must be text, not {value!r:.60}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise Refused(twice, "is given twice in one object")
    return row


def _is_deeper(value: Any, most: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inside) and (not most or any(_is_deeper(each, most - 1) for each in inside))


def _no_constant(name: str) -> None:
    raise Refused("row", f"holds {name}, which is no JSON number")


def _finite_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise Refused("row", f"holds {text:.40}, which is no finite number")
    return value
