"""Rows of published sets with their tests: HumanEval, MBPP, EvalPlus, Exercism, TheAlgorithms, CRUXEval.

A task file may hold them as they are: they are the kind `published` of `nano.task_rows`.
"""

from __future__ import annotations

import ast
import warnings
from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from nano_graders.solution_use import used_names
from nano_rl.tasks.task_file import FileRow, with_place
from nano_shared.hidden_checks import AnswerChecks, Suite, SuiteChecks
from nano_shared.process import parse
from nano_shared.types import OracleAction, Provenance, Task

_LITERAL = "Submit the value that belongs in place of `??`, as a Python literal."


class _PublishedTests(FileRow):
    runner: Literal["script", "pytest", "unittest", "doctest", "literal"]
    files: dict[str, str] = Field({})
    cmd: list[str] | None = None
    visible_files: dict[str, str] = Field({})
    expected: str | None = None
    """literal: the value, as Python writes it"""
    input: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> _PublishedTests:
        if self.runner == "literal" and self.expected is None:
            raise ValueError("`expected` is missing, which the runner 'literal' compares with")
        if self.runner != "literal" and not self.files:
            raise ValueError(f"`files` is empty, and the runner {self.runner!r} needs a test file")
        return self


class PublishedRow(FileRow):
    id: str
    source: str
    source_commit: str | None = None
    licence: str | None = None
    attribution: str | None = None
    kind: str
    split: str | None = None
    """the file that the row is from; not used, since tasks are split by family"""
    split_hint: str | None = None
    prompt: str = Field(pattern=r"\S")
    entry_point: str | None = None
    files: dict[str, str] = Field({})
    target: str
    tests: _PublishedTests
    reference_solution: str | None = None
    meta: dict[str, Any] = Field({})

    def task(self) -> Task:
        literal = self.tests.runner == "literal"
        return Task(
            key=self.id,
            prompt=f"{self.prompt.rstrip()}\n\n{_LITERAL}" if literal
            else with_place(self.prompt, self.target, self.entry_point),
            files={**self.files, **self.tests.visible_files},
            artifacts=() if literal else (self.target,),
            check=" && ".join(f"python {name}" for name in self.tests.visible_files) or None,
            hidden=self._hidden(),
            oracle=self._oracle(),
            family=str(self.meta.get("same_task") or self.id),
            view=self.kind,
            provenance=Provenance(source=self.source, licence=self.licence),
        )  # fmt: skip

    def _hidden(self) -> AnswerChecks | SuiteChecks:
        tests = self.tests
        if tests.runner == "literal":
            return AnswerChecks(answer=tests.expected)
        names = (self.entry_point,) if self.entry_point else ()
        suite = Suite(framework=tests.runner, files=tests.files, names=names, strict=self._needs_objects())
        return SuiteChecks(entry_point=self.entry_point, suite=suite)

    def _needs_objects(self) -> bool:
        """Whether values must stay in one process: tests exchange the solution's objects, or patch it."""
        used = used_names(self.tests.files, self.target)
        source = self.reference_solution or self.files.get(self.target, "")
        crossing = used | _crossing(source, self.entry_point)
        patches = any(_patches(text) for text in self.tests.files.values())
        return patches or bool(_classes(source) & crossing)

    def _oracle(self) -> tuple[OracleAction, ...] | None:
        if self.reference_solution is None:
            return None
        if self.tests.runner == "literal":
            return (OracleAction(name="submit", arguments={"answer": self.reference_solution}),)
        written: dict[str, JsonValue] = {"path": self.target, "content": self.reference_solution}
        return (OracleAction(name="write_file", arguments=written), OracleAction(name="submit"))


def _tree(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore"):  # syntax warnings of the text, such as invalid escapes
            return parse(text)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _crossing(text: str, entry_point: str | None) -> set[str]:
    """The names in the annotations and return values of the entry point."""
    said: list[ast.expr | None] = []
    for function in _tree(text).body:
        if isinstance(function, ast.FunctionDef) and function.name == entry_point:
            for node in ast.walk(function):
                if isinstance(node, ast.FunctionDef):
                    said.append(node.returns)
                elif isinstance(node, ast.arg):
                    said.append(node.annotation)
                elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                    said.append(node.value.func)
    return {n.id for part in said if part is not None for n in ast.walk(part) if isinstance(n, ast.Name)}


_NAMED_TUPLE = ("namedtuple(", "collections.namedtuple(")


def _classes(text: str) -> set[str]:
    """Names of classes that are no exceptions, including named tuples."""
    found: set[str] = set()
    for node in _tree(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith(_NAMED_TUPLE):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            bases = map(ast.unparse, node.bases)
            found |= set() if any(base.endswith(("Exception", "Error")) for base in bases) else {node.name}
    return found


def _patches(text: str) -> bool:
    """True if tests patch parts of the solution at run time."""
    return any(
        (isinstance(node, ast.Import) and any(a.name == "unittest.mock" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unittest.mock"))
        or (isinstance(node, ast.ImportFrom) and any(a.name == "mock" for a in node.names))
        or (isinstance(node, ast.arg) and node.arg in ("monkeypatch", "capsys", "capfd"))
        for node in ast.walk(_tree(text))
    )  # fmt: skip
