"""Records: what the tools of the workplace and `lookup` keep, as JSON objects in files of the workspace.

The end state of a task is in these files, so whoever grades reads them and trusts no tool.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from nano_coder.tools.read_file import read_text
from nano_coder.tools.tool import ToolContext, ToolFailure
from nano_coder.tools.write_file import write_text

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Records(Generic[Kind]):
    """One file that holds an object of records of one kind, by their id."""

    path: str
    kind: TypeAdapter[dict[str, Kind]]

    def load(self, context: ToolContext) -> dict[str, Kind]:
        """Raises ToolFailure where the file is missing or holds something else."""
        try:
            return self.kind.validate_json(read_text(context.jail, self.path), strict=True)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ToolFailure(f"{self.path} is damaged: {where}: {first['msg'].lower()}") from None

    def save(self, context: ToolContext, records: dict[str, Kind]) -> None:
        write_text(context.jail, self.path, written(self.kind.dump_python(records, mode="json")))


def written(records: dict[str, Any]) -> str:
    """The text of a file of records: the same records are the same text."""
    return json.dumps(records, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def pick(records: dict[str, Kind], key: str, noun: str) -> Kind:
    """The record under a key. Raises ToolFailure with the keys there are."""
    if key not in records:
        some = ", ".join(sorted(records)[:20]) or "none"
        raise ToolFailure(f"no {noun} {key!r}; there are: {some}")
    return records[key]
