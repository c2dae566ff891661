"""What a tool is: a typed function, its schema read from the signature, run against a jail."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from nano_coder.sandbox import ExecResult, Jail
from nano_shared.errors import UsageError
from nano_shared.types import Limits, ToolSpec

_SURROGATE = re.compile("[\ud800-\udfff]")
_PER_CORE = 4
_at_once = threading.BoundedSemaphore(_PER_CORE * len(os.sched_getaffinity(0)))
"""The commands of this process that run at once; others wait before their clock starts. A group's agents
begin alike: forty test suites at once on two cores take 20 s each, and some the 30 s of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool may touch: the jail and its limits, nothing of the host."""

    jail: Jail
    limits: Limits

    def run(self, argv: Sequence[str]) -> ExecResult:
        """Run a program in the jail. Raises ToolFailure for arguments that no program can be given."""
        with _failing(), _at_once:
            return self.jail.run(argv)

    def run_python(self, source: str, argv: Sequence[str] = (), *, isolated: bool = False) -> ExecResult:
        """Run Python source in the jail. Raises ToolFailure as `run` does."""
        with _failing(), _at_once:
            return self.jail.run_python(source, argv, isolated=isolated)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except UsageError as problem:
        raise ToolFailure(str(problem)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool did: the text for the model before truncation, and the truth behind it."""

    text: str
    ok: bool = True
    execution: ExecResult | None = None
    finished: bool = False
    """the agent declared the task done"""
    answer: str | None = None


class ToolFailure(Exception):
    """A tool could not do what was asked; the message is shown to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    spec: ToolSpec
    arguments: type[BaseModel]
    function: Callable[..., ToolResult]
    mutates: bool
    """may change the workspace, so a snapshot follows"""

    def __call__(self, context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        """Validate the arguments and run. Raises ToolFailure with what was wrong and what is right."""
        try:
            values = self.arguments.model_validate(arguments)
        except ValidationError as problem:
            raise ToolFailure(self._explain(problem)) from None
        given = {key: getattr(values, key) for key in self.arguments.model_fields}
        for key, value in given.items():
            if isinstance(value, str) and _SURROGATE.search(value):
                raise ToolFailure(f"{key} holds half of a surrogate pair, which is no text")
        return self.function(context, **given)

    def _explain(self, problem: ValidationError) -> str:
        known = self.arguments.model_fields
        wrong = []
        for error in problem.errors():
            key = ".".join(str(part) for part in error["loc"])
            if error["type"] == "extra_forbidden":
                wrong.append(f"unknown argument {key}")
            elif error["type"] == "missing":
                wrong.append(f"{key} is missing")
            else:
                wrong.append(f"{key}: {error['msg'].lower()}")
        usage = ", ".join(key if field.is_required() else f"{key}?" for key, field in known.items())
        return f"{'; '.join(wrong)}. Usage: {self.spec.name}({usage})"


def tool(*, body: str | None = None, mutates: bool = False) -> Callable[[Callable[..., ToolResult]], Tool]:
    """Make a Tool of a function `f(context, **arguments)`: name, schema and description are its own."""

    def build(function: Callable[..., ToolResult]) -> Tool:
        hints = get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        fields: dict[str, Any] = {
            p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in parameters
        }
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        spec = ToolSpec(
            name=function.__name__,
            description=(inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " "),
            parameters=_plain_schema(model),
            body=body,
        )
        return Tool(spec=spec, arguments=model, function=function, mutates=mutates)

    return build


def _plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema without the titles that pydantic adds, which would cost a model tokens."""
    schema = model.model_json_schema()
    properties = {
        key: {k: v for k, v in value.items() if k != "title"}
        for key, value in schema.get("properties", {}).items()
    }
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}
