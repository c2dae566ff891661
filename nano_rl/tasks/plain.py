"""The plainest task row: `{"id", "prompt", "target", "entry_point", "cases", "files"}`."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, JsonValue, field_validator

from nano_shared.types import Case, HiddenChecks, Limits, Split, Task, Value


class PlainCase(Value):
    """One call and what it must give; `expected` has no default, since null is a value too."""

    args: list[JsonValue] = Field(default=[])
    kwargs: dict[str, JsonValue] = Field(default={})
    expected: JsonValue

    @field_validator("args", "kwargs", "expected")
    @classmethod
    def _finite(cls, value: JsonValue) -> JsonValue:
        _refuse_infinite(value)
        return value


class PlainRow(Value):
    """A function to write into a file, and the calls that it is graded by."""

    id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    target: str = "solution.py"
    """file that is graded"""
    entry_point: str = Field(min_length=1)
    cases: tuple[PlainCase, ...] = Field(min_length=1)
    files: dict[str, str] = Field(default={})
    """starting workspace"""
    limits: Limits = Limits()
    split: Split | None = None
    level: int | None = None
    family: str | None = None

    @field_validator("target")
    @classmethod
    def _inside(cls, target: str) -> str:
        if not target or target.startswith("/") or "\0" in target or ".." in target.split("/"):
            raise ValueError(f"{target!r} must be a file of the workspace, by its relative path")
        return target


def is_plain(row: Any) -> bool:
    return isinstance(row, dict) and "key" not in row and "cases" in row


def plain_task(row: PlainRow) -> Task:
    cases = tuple(Case(args=c.args, kwargs=c.kwargs, expected=c.expected) for c in row.cases)
    return Task(
        key=row.id, prompt=row.prompt, files=row.files, artifacts=(row.target,), limits=row.limits,
        hidden=HiddenChecks(kind="cases", entry_point=row.entry_point, cases=cases),
        split=row.split, level=row.level, family=row.family,
    )  # fmt: skip


def _refuse_infinite(value: JsonValue) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_infinite(item)
