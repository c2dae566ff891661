"""Metrics as JSON lines: one object a step, flushed, continued without gaps on resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Appends to `path`. Rows at or beyond `from_step` are dropped first: a resumed run writes them again."""

    def __init__(self, path: Path, *, from_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_metrics(path) if row["step"] < from_step] if path.exists() else []
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._path = path

    def write(self, step: int, values: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every complete row; a line that a kill cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
