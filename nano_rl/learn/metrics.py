"""Metrics of a run: one JSON line a step, appended and flushed, cut back when a run is resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nano_shared import UsageError

SUCCESS = "success/"
"""prefix of the share of rollouts that succeed; behind it `all` or `level_N`"""
GRADED = "graded/"
"""prefix of the number of rollouts that share is of"""
HELD_OUT = "held_out"
"""success on held-out tasks before the step, in the steps that it is measured in"""
PART = "part/"
"""prefix of the mean of a part of a composed reward, over the rollouts that it spoke of"""
Row = dict[str, float | None]
METRICS = "metrics.jsonl"
"""the file's name in the folder of a training"""


class RowWriter:
    """Appends JSON lines, each of one step, to `path`, creating it and its folder.

    `resume_at` is the first step that will be run: rows from that step on, written by a run that was killed
    after its last checkpoint, are dropped, and so is a torn last line. Without it the file must be new.

    Raises UsageError when the file holds rows and `resume_at` is not given.
    """

    def __init__(self, path: Path, *, resume_at: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_at is None:
                raise UsageError(f"{path} holds metrics of another run; resume it or choose another output")
            _truncate(path, resume_at)
        self._file = path.open("a", encoding="utf-8")

    def write_row(self, row: Mapping[str, Any]) -> None:
        """One line, on disk when this returns."""
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MetricsWriter(RowWriter):
    """The metrics of a run, a row a step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line, on disk when this returns. A number that JSON lacks (NaN, infinity) becomes null."""
        row: Row = {"step": step}
        row |= {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.write_row(row)


def read_metrics(path: Path) -> list[Row]:
    """The rows of a metrics file; see `read_rows`."""
    return read_rows(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a file of JSON lines, in order; a torn last line is left out.

    Raises UsageError for any other line that is not JSON.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: list[dict[str, Any]] = []
    # what follows the last newline was never finished
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{path}:{number} is not JSON ({error.msg}); it is not a metrics file"
            ) from error
    return rows


def _truncate(path: Path, resume_at: int) -> None:
    kept = [row for row in read_rows(path) if (row.get("step") or 0) < resume_at]
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
