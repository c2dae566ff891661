"""The contract of a format of tasks (`nano.task_formats`): the plug-in formats reads and writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from nano_shared.errors import Refusal
from nano_shared.extension_points import Extensions
from nano_shared.snapshot import BlobStore
from nano_shared.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    repo: Path | None = None
    """swe-bench: the local git repository, or a folder that holds them as owner__name"""
    blobs: BlobStore | None = None
    """where a starting workspace goes that `files` cannot hold: binaries, links, executables"""


class TaskFormat(Protocol):
    """Tasks in the format of another project; `nano.task_formats` registers one."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def read(self, path: Path, options: ReadOptions) -> Iterator[Task | Refusal]:
        """All tasks and refusals of a file or folder, in order. Raises UsageError if it cannot be read."""

    def refusals(self, tasks: Sequence[Task]) -> list[Refusal]: ...

    def write(self, tasks: Sequence[Task], path: Path) -> None:
        """Raises Refused for the first task that cannot be written; nothing is written then."""


@runtime_checkable
class RecognisesPath(Protocol):
    """A format that is recognised by a path alone: a folder by its files, a file by its suffix."""

    def recognises_path(self, path: Path) -> bool: ...


def _no_format(value: object) -> str | None:
    lacks = [name for name in ("name", "summary") if not isinstance(getattr(value, name, None), str)]
    lacks += [name for name in ("read", "refusals", "write") if not callable(getattr(value, name, None))]
    return f"is no format of tasks: it has no {lacks[0]}" if lacks else None


FORMATS: Extensions[TaskFormat] = Extensions("nano.task_formats", check=_no_format)
