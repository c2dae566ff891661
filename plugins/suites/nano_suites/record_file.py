"""Records by id in a JSON file of the workspace, and the tool `lookup`, which reads those of a task."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from nano_coder.tools.text_files import read_text, write_data
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool

RecordType = TypeVar("RecordType")


@dataclass(frozen=True, slots=True)
class Records(Generic[RecordType]):
    """A file with a JSON object of records of one type, by id."""

    path: str
    kind: TypeAdapter[dict[str, RecordType]]

    def load(self, context: ToolContext) -> dict[str, RecordType]:
        """The records by id. Raises ToolFailure if the file is missing or invalid."""
        try:
            return self.kind.validate_json(read_text(context.jail, self.path).text, strict=True)
        except ValidationError as problem:
            first = problem.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise ToolFailure(f"{self.path} is damaged: {where}: {first['msg'].lower()}") from None

    def save(self, context: ToolContext, records: dict[str, RecordType]) -> None:
        write_data(context.jail, self.path, written(self.kind.dump_python(records, mode="json")).encode())


def written(records: dict[str, Any]) -> str:
    """The text of a file of records; equal records give equal text."""
    return json.dumps(records, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


FACTS: Records[dict[str, str | int]] = Records("facts.json", TypeAdapter(dict[str, dict[str, str | int]]))


@tool()
def lookup(context: ToolContext, subject: str) -> ToolResult:
    """Show what is known about a subject: a person, a place, a thing."""
    facts = FACTS.load(context)
    names = {name.casefold(): name for name in facts}
    name = names.get(subject.strip().casefold())
    if name is None:
        raise ToolFailure(f"nothing is known about {subject!r}")
    return ToolResult(text="\n".join(f"{key}: {value}" for key, value in facts[name].items()))
