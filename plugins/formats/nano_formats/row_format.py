"""Rows of JSON of other projects as tasks and back: one object a task, kept unchanged where it can be.

An imported row is kept in `provenance.original`; an export writes it unchanged as long as the task is the
same. Other tasks are written in the fields of the format, and completely, as JSON text, in the column
`nano_task`. An import refuses a row in which only one of the two was edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from nano_rl.task_formats import FORMATS, ReadOptions, RecognisesPath, TaskFormat
from nano_rl.tasks.task_file import read_rows, write_lines
from nano_shared.errors import Refusal, Refused, UsageError
from nano_shared.extension_points import is_reference
from nano_shared.strict_json import Row, parse_json, refusing_invalid, to_json, validated
from nano_shared.types import Task


class OpenModel(BaseModel):
    """Fields beyond the declared ones stay: a row is kept whole, and its format's validator sees to it."""

    model_config = ConfigDict(extra="allow", strict=True)


WHOLE = "nano_task"
"""column with the whole task as JSON text: a text survives readers that unify the columns of all rows"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    name: str
    summary: str
    recognises: Callable[[Row], bool]
    read_row: Callable[[Row], Task]
    """a row as a task; raises Refused"""
    write_row: Callable[[Task], Row] | None = None
    """a task in the format's own fields; raises Refused for a task that its readers could not use"""
    understood: frozenset[str] = frozenset()
    """fields that `read_row` reads: when a task was changed, those of the old row are not carried on"""
    repeats: bool = False
    """several rows may belong to one task, such as the rollouts of it"""

    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        found: dict[str, tuple[str, Task]] = {}
        for where, row in self.rows(path):
            if isinstance(row, Refusal):
                yield row
                continue
            try:
                task = self.from_row(row)
                if task.key in found:
                    task = self._joined(*found[task.key], task)
                found[task.key] = (found.get(task.key, (where,))[0], task)
            except Refused as problem:
                yield Refusal.of(where, problem)
        yield from (task for _, task in found.values())

    def rows(self, path: Path) -> Iterator[tuple[str, Row | Refusal]]:
        return read_rows(path)

    def refusals(self, tasks: Sequence[Task]) -> list[Refusal]:
        return [problem for task in tasks if (problem := refusal(task, self.to_rows))]

    def write(self, tasks: Sequence[Task], path: Path) -> None:
        """Raises Refused for the first task that cannot be written; nothing is written then."""
        self.write_rows(path, [row for task in tasks for row in self.to_rows(task)])

    def write_rows(self, path: Path, rows: Iterable[Row]) -> None:
        write_lines(path, map(to_json, rows))

    def from_row(self, row: Row) -> Task:
        """Raises Refused where the row is malformed, or its fields and its whole task disagree."""
        if WHOLE not in row:
            with refusing_invalid():
                return with_original(self.read_row(row), self.name, rows=[row])
        task = embedded(row)
        (written,) = self.to_rows(task)
        for field in written:
            if field not in row or to_json(row[field]) != to_json(written[field]):
                raise Refused(field, f"is not what {WHOLE} says; change both, or remove {WHOLE}")
        if row.keys() - written.keys():
            task = with_original(task, self.name, rows=[row])
        return task

    def to_rows(self, task: Task) -> list[Row]:
        """Raises Refused with the field that this format cannot carry."""
        rows = original_rows(task, self.name)
        if rows and self._means(rows, task):
            return rows
        if self.write_row is None:
            raise Refused("provenance.original", f"only tasks imported from {self.name} are written to it")
        refuse_uncarried(task)
        row = self.write_row(task) | {WHOLE: whole(task)}
        unknown = rows[0].items() if len(rows) == 1 else ()
        return [{key: value for key, value in unknown if key not in self.understood | {WHOLE}} | row]

    def _means(self, rows: list[Row], task: Task) -> bool:
        try:
            read = self.from_row(rows[0])
            for row in rows[1:]:
                read = self._joined("", read, self.from_row(row))
        except Refused:
            return False
        return whole(read) == whole(task)

    def _joined(self, where: str, first: Task, again: Task) -> Task:
        """One task of two rows. Raises Refused where this format gives each task one row."""
        rows = [*original_rows(first, self.name), *original_rows(again, self.name)]
        joined = with_original(first, self.name, rows=rows)
        if not self.repeats or whole(with_original(again, self.name, rows=rows)) != whole(joined):
            raise Refused("key", f"{first.key!r} is already the task at {where}")
        return joined


def is_own(row: Row) -> bool:
    """Whether a row says how it is graded in the fields of a task of nano."""
    graded = row.keys() & {"hidden", "check", "oracle", "provenance"}
    return bool(graded) and row.keys() <= Task.model_fields.keys()


def refuse_uncarried(task: Task) -> None:
    """Raises Refused for what no format of others can carry."""
    if task.snapshot is not None:
        raise Refused("snapshot", "the blob store that holds its files stays behind; give it `files`")
    if task.earlier:
        raise Refused("earlier", "the tasks that come before it would stay behind, and what they remember")


def refusal(task: Task, convert: Callable[[Task], object]) -> Refusal | None:
    try:
        convert(task)
    except Refused as problem:
        return Refusal.of(task.key, problem)
    return None


def whole(task: Task) -> str:
    """The task as one line of JSON, defaults left out. Raises Refused for what JSON cannot carry."""
    return to_json(task.model_dump(mode="json", exclude_defaults=True))


def embedded(row: Row) -> Task:
    """The task that a row carries as a whole. Raises Refused where that is no task."""
    if not isinstance(row[WHOLE], str):
        raise Refused(WHOLE, "must be JSON text")
    return validated(Task, parse_json(row[WHOLE]), WHOLE)


def with_original(task: Task, format: str, **parts: object) -> Task:
    provenance = task.provenance.model_copy(update={"original": {"format": format, **parts}})
    return task.model_copy(update={"provenance": provenance})


def original_rows(task: Task, format: str) -> list[Row]:
    """The rows that the task was read from, if it was read from this format."""
    original = task.provenance.original
    if original is None or original.get("format") != format:
        return []
    rows = original.get("rows")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


ORDER = ("harbor", "nemo-gym", "swe-bench", "humaneval", "mbpp", "rows", "verifiers", "trl")
"""the formats in which a folder or a row is tried first: more specific fields first"""


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
    """The format of that name, or of `path.py:name`. Raises UsageError or ConfigError."""
    if name not in FORMATS and not is_reference(name):
        raise UsageError(f"unknown format {name!r}; the formats are {', '.join(FORMATS)}, or path.py:name")
    return FORMATS.find(name)


def guess_format(path: Path) -> TaskFormat:
    """The format of a folder by its files, or of a file by its first row. Raises UsageError if unknown."""
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    names = [name for name in ORDER if name in FORMATS]
    known = [FORMATS.find(name) for name in (*names, *(name for name in FORMATS if name not in names))]
    for format in known:
        if isinstance(format, RecognisesPath) and format.recognises_path(path):
            return format
    named = f"with --from ({', '.join(FORMATS)})"
    if path.is_dir():
        raise UsageError(f"{path}: no folder in it looks like a task; name the format {named}")
    for rows in (OWN, *known):
        if not isinstance(rows, RowFormat):
            continue
        first = next((row for _, row in rows.rows(path) if not isinstance(row, Refusal)), None)
        if first is not None and rows.recognises(first):
            return rows
    raise UsageError(f"{path}: its first row looks like no known format; name it {named}")
