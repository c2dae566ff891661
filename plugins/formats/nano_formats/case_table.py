"""Tables of cases as CSV, one row per case (`args`, `kwargs`, `expected`) or task; Exercism folders.

Columns: id, prompt, entry_point, and optionally target and nano_task; args, kwargs, expected and cases hold
JSON. Rows with the same id belong to one task.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nano_formats.folder_format import FolderFormat, Tree
from nano_formats.function_rows import open_task, plain_cases, read_published, target
from nano_rl.formats import WHOLE, RowFormat
from nano_rl.tasks.task_file import read_text
from nano_shared.errors import Refusal, Refused
from nano_shared.hidden_checks import CaseChecks, SuiteChecks
from nano_shared.strict_json import Row, parse_json, to_json, validated
from nano_shared.types import Task

CONFIG, INSTRUCTIONS = ".meta/config.json", ".docs/instructions.md"
_DOCS = (".docs/introduction.md", INSTRUCTIONS, ".docs/instructions.append.md")


class _Files(BaseModel):
    model_config = ConfigDict(extra="allow")

    solution: list[str] = Field(min_length=1)
    test: list[str] = Field(min_length=1)
    example: list[str] = []
    exemplar: list[str] = []
    editor: list[str] = []


class _Config(BaseModel):
    model_config = ConfigDict(extra="allow")

    files: _Files
    blurb: str = ""


def read_exercism(tree: Tree, name: str) -> Task:
    files = validated(_Config, parse_json(tree.text(CONFIG)), CONFIG).files
    if len(files.solution) != 1:
        raise Refused(f"{CONFIG}.files.solution", f"{len(files.solution)} files to write; one is graded here")
    docs = [tree.text(path).strip() for path in _DOCS if path in tree.files]
    if not docs:
        raise Refused(INSTRUCTIONS, "is missing, so nothing says what to do")
    examples = files.example or files.exemplar
    tests = {path: tree.text(path) for path in files.test}
    runner = "unittest" if any("import unittest" in text for text in tests.values()) else "pytest"
    return open_task(
        {
            "id": f"exercism/{name}", "source": "exercism", "kind": "implement",
            "prompt": "\n\n".join(docs), "target": files.solution[0],
            "files": {path: tree.text(path) for path in [*files.solution, *files.editor]},
            "tests": {"runner": runner, "files": tests},
            "reference_solution": tree.text(examples[0]) if examples else None,
        }
    )  # fmt: skip


def write_exercism(task: Task) -> Tree:
    """The task of an exercise. Raises Refused if no test file checks it."""
    suite = task.hidden.suite if isinstance(task.hidden, SuiteChecks) else None
    if suite is None or suite.framework not in ("unittest", "pytest"):
        raise Refused("hidden.kind", "an exercise is checked by test files of unittest or pytest")
    if len(task.artifacts) != 1:
        raise Refused("artifacts", f"{len(task.artifacts)} files are graded; an exercise has one")
    (solution,) = task.artifacts
    files = {solution: "", **task.files, **suite.files, INSTRUCTIONS: task.prompt}
    roles: dict[str, Any] = {"solution": [solution], "test": list(suite.files)}
    if set(suite.files) & {solution, *task.files}:
        raise Refused("hidden.suite.files", "a test file has the name of a file of the workspace")
    roles["editor"] = [path for path in task.files if path != solution]
    for action in task.oracle or ():
        if action.name == "write_file" and action.arguments.get("path") == solution:
            roles["example"] = [".meta/example.py"]
            files[".meta/example.py"] = str(action.arguments.get("content", ""))
    files[CONFIG] = to_json({"files": roles}) + "\n"
    return Tree({path: text.encode() for path, text in files.items()})


EXERCISM = FolderFormat(
    name="exercism",
    summary="Exercism exercises, a folder each",
    marker=CONFIG,
    read_tree=read_exercism,
    write_tree=write_exercism,
)


_CASE = ("args", "kwargs", "expected")
_JSON = ("cases", "files", *_CASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable(RowFormat):
    def recognises_path(self, path: Path) -> bool:
        return path.suffix == ".csv" and not path.is_dir()

    def rows(self, path: Path) -> Iterator[tuple[str, Row | Refusal]]:
        """One row per task, with the place of its first line."""
        reader = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
        tasks: dict[str, tuple[str, Row]] = {}
        try:
            for cells in reader:
                where = f"{path}:{reader.line_num}"
                try:
                    _take(_parsed(cells), where, tasks)
                except Refused as problem:
                    yield where, Refusal.of(where, problem)
        except csv.Error as problem:
            yield str(path), Refusal(f"{path}:{reader.line_num}", "row", f"is not CSV: {problem}")
        yield from tasks.values()

    def write_rows(self, path: Path, rows: Iterable[Row]) -> None:
        cells = [{k: v if isinstance(v, str) else to_json(v) for k, v in row.items()} for row in rows]
        columns = list(dict.fromkeys(key for row in cells for key in row))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows(cells)


def _parsed(cells: dict[str | Any, Any]) -> Row:
    if None in cells or None in cells.values():
        raise Refused("row", "has more or fewer cells than the header")
    row = {key: text for key, text in cells.items() if text != "" or key in ("prompt", "id")}
    for field in _JSON:
        if field in row:
            try:
                row[field] = parse_json(row[field])
            except Refused as problem:
                raise Refused(field, problem.why) from None
    if not row.get("id"):
        raise Refused("id", "is missing")
    return row


def _take(row: Row, where: str, tasks: dict[str, tuple[str, Row]]) -> None:
    """Add a line to its task."""
    if WHOLE not in row and "cases" not in row:
        if "expected" not in row:
            raise Refused("expected", "is missing, and `cases` too")
        row["cases"] = [{key: row.pop(key) for key in _CASE if key in row}]
        known = tasks.get(row["id"])
        if known is not None:
            for key in {*row, *known[1]} - {"cases"}:
                if key in row and row[key] != known[1].get(key):
                    raise Refused(key, f"is not what the first line of {row['id']!r} says")
            known[1]["cases"].extend(row["cases"])
            return
    if row["id"] in tasks:
        raise Refused("id", f"{row['id']!r} is already the task at {tasks[row['id']][0]}")
    tasks[row["id"]] = (where, row)


def write_row(task: Task) -> Row:
    if not isinstance(task.hidden, CaseChecks):
        raise Refused("hidden.kind", "a table holds functions and their cases, and no other check")
    return {
        "id": task.key,
        "prompt": task.prompt,
        "target": target(task),
        "entry_point": task.hidden.entry_point,
        "files": task.files,
        "cases": plain_cases(task.hidden),
    }


CASES_CSV = CaseTable(
    name="csv",
    summary="CSV of functions and their cases",
    recognises=lambda row: "cases" in row,
    read_row=read_published,
    write_row=write_row,
    understood=frozenset({"id", "prompt", "target", "entry_point", "files", "cases"}),
)
