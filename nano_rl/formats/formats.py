"""The formats by name, and which of them a file or folder is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nano_rl.formats.case_table import CASES_CSV
from nano_rl.formats.exercism import EXERCISM
from nano_rl.formats.folder_format import FolderFormat
from nano_rl.formats.function_rows import EVALPLUS, HUMANEVAL, MBPP
from nano_rl.formats.harbor import HARBOR
from nano_rl.formats.nemo_gym import NEMO_GYM
from nano_rl.formats.plain_rows import ROWS as PUBLISHED
from nano_rl.formats.row_format import ReadOptions, RowFormat
from nano_rl.formats.swe_bench import SWE_BENCH
from nano_rl.formats.trl import TRL
from nano_rl.formats.verifiers import VERIFIERS
from nano_shared.errors import UsageError
from nano_shared.refusal import Refusal
from nano_shared.types import Task


class Format(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        """Every task, and every refusal in its place. Raises UsageError where nothing can be read."""
        ...

    def refusals(self, tasks: Sequence[Task]) -> list[Refusal]:
        """The tasks that cannot be written, each with its reason."""
        ...

    def write(self, tasks: Sequence[Task], path: Path) -> None:
        """Raises Refused for the first task that cannot be written; nothing is written then."""
        ...


ROWS: tuple[RowFormat, ...] = (NEMO_GYM, SWE_BENCH, EVALPLUS, HUMANEVAL, MBPP, PUBLISHED, VERIFIERS, TRL)
"""in the order in which a row is tried: the most telling fields first"""
FOLDERS: tuple[FolderFormat, ...] = (HARBOR, EXERCISM)
FORMATS: dict[str, Format] = {format.name: format for format in (*FOLDERS, *ROWS, CASES_CSV)}


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise UsageError(f"unknown format {name!r}; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def guess_format(path: Path) -> Format:
    """The format that a folder's files or a file's first row speak for. Raises UsageError."""
    names = ", ".join(FORMATS)
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    if path.is_dir():
        for folder in FOLDERS:
            if folder.recognises(path):
                return folder
        raise UsageError(f"{path}: no folder in it looks like a task; name the format with --from ({names})")
    if path.suffix == ".csv":
        return CASES_CSV
    for rows in ROWS:
        first = next((row for _, row in rows.rows(path) if not isinstance(row, Refusal)), None)
        if first is not None and rows.recognises(first):
            return rows
    raise UsageError(f"{path}: its first row looks like no known format; name it with --from ({names})")
