"""Task formats of other projects by name (`nano.task_formats`), and which one a file or folder is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from nano_rl.formats.row_format import ReadOptions, RowFormat, is_own
from nano_shared.errors import Refusal, UsageError
from nano_shared.extensions import PLUGINS, Extensions, is_reference, refuse_missing
from nano_shared.strict_json import Row, validated
from nano_shared.types import Task


class TaskFormat(Protocol):
    """Tasks in the format of another project; `nano.task_formats` registers one."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        """All tasks and refusals of a file or folder, in order. Raises UsageError if it cannot be read."""
        ...

    def refusals(self, tasks: Sequence[Task]) -> list[Refusal]:
        """The tasks that cannot be written, each with its reason."""
        ...

    def write(self, tasks: Sequence[Task], path: Path) -> None:
        """Raises Refused for the first task that cannot be written; nothing is written then."""
        ...


@runtime_checkable
class RecognisesPath(Protocol):
    """A format that is recognised by a path alone: a folder by its files, a file by its suffix."""

    def recognises_path(self, path: Path) -> bool: ...


FORMATS: Extensions[TaskFormat] = Extensions("nano.task_formats", check=lambda value: _no_format(value))
OF_PLUGIN = PLUGINS[FORMATS.group]
"""of a plug-in, in the order in which a folder or a row is tried: more specific fields first"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnFormat(RowFormat):
    def from_row(self, row: Row) -> Task:
        """The task as it is. Raises Refused for a field that no task has."""
        return validated(Task, row)


OWN = _OwnFormat(
    name="nano",
    summary="task files of nano",
    recognises=lambda row: {"key", "prompt"} <= row.keys() and is_own(row),
    read_row=lambda row: validated(Task, row),
)


def find_format(name: str) -> TaskFormat:
    """The format of that name, or of `path.py:name`. Raises UsageError with the names there are, or with the
    plug-in that brings it, and ConfigError for one that cannot be loaded."""
    if name not in FORMATS and not is_reference(name):
        refuse_missing(FORMATS.group, name)
        raise UsageError(f"unknown format {name!r}; the formats are {_names()}, or path.py:name")
    return FORMATS.find(name)


def guess_format(path: Path) -> TaskFormat:
    """The format of a folder by its files, or of a file by its first row. Raises UsageError if unknown."""
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    names = [name for name in OF_PLUGIN if name in FORMATS]
    known = [FORMATS.find(name) for name in (*names, *(name for name in FORMATS if name not in names))]
    for format in known:
        if isinstance(format, RecognisesPath) and format.recognises_path(path):
            return format
    if path.is_dir():
        raise UsageError(
            f"{path}: no folder in it looks like a task; name the format with --from ({_names()})"
        )
    for rows in (OWN, *known):
        if not isinstance(rows, RowFormat):
            continue
        first = next((row for _, row in rows.rows(path) if not isinstance(row, Refusal)), None)
        if first is not None and rows.recognises(first):
            return rows
    raise UsageError(f"{path}: its first row looks like no known format; name it with --from ({_names()})")


def _names() -> str:
    missing = dict.fromkeys(plugin for name, plugin in OF_PLUGIN.items() if name not in FORMATS)
    without = [f"those of the plug-in {name}: pip install 'nano-rl-coder[{name}]'" for name in missing]
    return ", ".join([*FORMATS, *without])


def _no_format(value: object) -> str | None:
    lacks = [name for name in ("name", "summary") if not isinstance(getattr(value, name, None), str)]
    lacks += [name for name in ("read", "refusals", "write") if not callable(getattr(value, name, None))]
    return f"is no format of tasks: it has no {lacks[0]}" if lacks else None
