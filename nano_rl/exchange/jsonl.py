"""JSON lines read strictly: no key twice, no number that JSON does not know, every line accounted for."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from nano_rl.exchange.refusal import Refusal, Refused
from nano_shared.errors import UsageError

Row = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)


def read_text(path: Path) -> str:
    """A text file, unpacked where its name ends in .gz. Raises UsageError where it cannot be read."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: cannot be read: {problem}") from None


def read_rows(path: Path) -> Iterator[tuple[str, Row | Refusal]]:
    """Every row with its place: a JSON object a line, or one JSON array of objects."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            items = parse_json(text)
        except Refused as problem:
            yield str(path), Refusal.of(str(path), problem)
            return
        for number, item in enumerate(items):
            yield _object(f"{path}[{number}]", item)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                yield _object(where, parse_json(line))
            except Refused as problem:
                yield where, Refusal.of(where, problem)


def parse_json(text: str) -> Any:
    """A JSON value. Raises Refused for broken JSON, a key given twice, NaN, infinity and other surprises."""
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise Refused("row", "is nested too deeply") from None
    except ValueError as problem:
        raise Refused("row", f"is not JSON: {problem}") from None


def to_json(value: Any) -> str:
    """One line of JSON. Raises Refused for what JSON or UTF-8 cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise Refused("task", "holds half of a surrogate pair, which no UTF-8 file carries") from None
    except (ValueError, RecursionError):
        raise Refused("task", "holds NaN, infinity or too deep a nesting, which JSON cannot carry") from None
    return text


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")


def validated(model: type[Model], value: Any, at: str = "") -> Model:
    """A value as a model of ours. Raises Refused with the first field that is wrong."""
    with refusing_invalid(at):
        return model.model_validate(value)


@contextmanager
def refusing_invalid(at: str = "") -> Iterator[None]:
    """Whatever a model of ours does not take becomes Refused, with the first field that is wrong."""
    try:
        yield
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join([*([at] if at else []), *(str(part) for part in first["loc"])])
        raise Refused(field or "row", first["msg"].removeprefix("Value error, ")) from None


def text_field(row: Row, name: str) -> str:
    """A field that must hold text. Raises Refused where it is missing, blank or something else."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(name, "is missing" if name not in row else f"must be text, not {value!r:.60}")
    return value


def _object(where: str, item: Any) -> tuple[str, Row | Refusal]:
    if isinstance(item, dict):
        return where, item
    return where, Refusal(where, "row", f"must be a JSON object, not {type(item).__name__}")


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1)
        raise Refused(twice, "is given twice in one object")
    return row


def _no_constant(name: str) -> None:
    raise Refused("row", f"holds {name}, which is no JSON number")


def _finite_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise Refused("row", f"holds {text:.40}, which is no finite number")
    return value
