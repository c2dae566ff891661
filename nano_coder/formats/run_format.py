"""Formats of runs by name (`nano.run_formats`): what `log export` writes and `log import` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano_shared.blobs import BlobStore
from nano_shared.extensions import Extensions
from nano_shared.logged_run import LoggedRun
from nano_shared.refusal import Refused
from nano_shared.strict_json import Row, at_place, decoded, json_lines, json_object
from nano_shared.types import Message

Read = Callable[[Path, BlobStore | None], Iterable[LoggedRun]]
"""the runs of a file, whose blobs are stored where a store is given; raises Refused with place and field"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFormat:
    """One format of runs. It reads, or writes in one of two ways, or both."""

    name: str
    read: Read | None = None
    write_run: Callable[[LoggedRun, Sequence[Message] | None, list[dict[str, Any]] | None], Row] | None = None
    """a run, its first messages and its tools (None: not known) -> one line of JSON; raises Refused"""
    write_file: Callable[[Iterable[LoggedRun], BlobStore | None, set[str]], Iterator[Row]] | None = None
    """runs, the log's blobs (None: leave them out) and the ids of lost blobs, to add to -> all lines"""
    alone: bool = False
    """a .json file holds one run; a .jsonl file, or a folder, many"""

    @property
    def writes(self) -> bool:
        return any((self.write_run, self.write_file))


RUN_FORMATS: Extensions[RunFormat] = Extensions("nano.run_formats", RunFormat)


def row_reader(reader: Callable[[Row], Iterable[LoggedRun]], *, lines: bool = False) -> Read:
    """Reads a JSON object a file, or one a line: in a .jsonl file, and where `lines` is set in any."""

    def read(path: Path, _: BlobStore | None) -> Iterator[LoggedRun]:
        rows = json_lines(path) if lines or path.suffix == ".jsonl" else [(str(path), _object(path))]
        for where, row in rows:
            with at_place(where):
                found = list(reader(row))
            yield from found

    return read


def session_reader(reader: Callable[[str, Iterable[tuple[str, Row]]], LoggedRun]) -> Read:
    """Reads a file whose lines are one run; `reader` is given its name and its lines with their places."""
    return lambda path, _: [reader(str(path), json_lines(path))]


def _object(file: Path) -> Row:
    with at_place(str(file)):
        try:
            return json_object(decoded(file.read_bytes()))
        except OSError as problem:
            raise Refused("file", f"cannot be read: {problem.strerror}") from None
