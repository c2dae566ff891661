"""Strict JSON lines: no duplicate keys, no NaN or infinity; every line is a row or a refusal."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from nano_shared.errors import Refusal, Refused, UsageError
from nano_shared.strict_json import Row, parse_json, validated

RowModel = TypeVar("RowModel", bound=BaseModel)


def read_text(path: Path) -> str:
    """Read a text file, decompressed if its name ends in .gz. Raises UsageError if it cannot be read."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        raise UsageError(f"{path}: cannot be read: {problem}") from None


def read_rows(path: Path) -> Iterator[tuple[str, Row | Refusal]]:
    """(place, row) of each row: one JSON object per line, or one JSON array of objects."""
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


def read_models(path: Path, kind: type[RowModel]) -> Iterator[tuple[str, RowModel]]:
    """(place, row) of each row as a model. Raises UsageError with place and field of the first bad row."""
    for where, row in read_rows(path):
        try:
            if isinstance(row, Refusal):
                raise Refused(row.field, row.why)
            yield where, validated(kind, row)
        except Refused as problem:
            raise UsageError(f"{where}: {problem}") from None


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="")


def _object(where: str, item: Any) -> tuple[str, Row | Refusal]:
    if isinstance(item, dict):
        return where, item
    return where, Refusal(where, "row", f"must be a JSON object, not {type(item).__name__}")
