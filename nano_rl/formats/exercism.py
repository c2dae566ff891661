"""Exercism exercises: a folder with instructions, a stub, a test file and an example solution."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from nano_rl.formats.folder_format import FolderFormat, Tree
from nano_rl.formats.plain_rows import open_task
from nano_rl.tasks.jsonl import parse_json, to_json, validated
from nano_shared.refusal import Refused
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
    """Raises Refused for a task that no test file checks."""
    suite = task.hidden.suite if task.hidden is not None else None
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
