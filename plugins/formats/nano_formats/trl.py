"""An environment class for TRL's `GRPOTrainer(environment_factory=...)`, without importing TRL.

    trainer = GRPOTrainer(model, train_dataset=rows, environment_factory=environment_class())

where `rows` are those of `nano-rl tasks export --to trl`. TRL makes one instance per rollout, calls
`reset(**row)`, offers the other public methods to the model as tools, and calls `get_reward()` at the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nano_coder.config import redacting_store
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_coder.tools.tool import TOOLS
from nano_formats.episode import PROFILE, Episode, EpisodeOver
from nano_formats.row_format import WHOLE, RowFormat, embedded, is_own
from nano_formats.verifiers import messages_text
from nano_shared.errors import Refused, UsageError
from nano_shared.files import content_hash
from nano_shared.store import LogStore
from nano_shared.strict_json import Row
from nano_shared.types import Provenance, Task, ToolSpec

NAME = "trl"


def read_row(row: Row) -> Task:
    """A prompt without a check: TRL's reward functions are code, which is not part of a row."""
    if "prompt" not in row:
        raise Refused("prompt", "is missing")
    if is_own(row):
        raise Refused(
            "prompt", "is one of a task of nano, whose checks this format cannot carry; leave --from out"
        )
    key = f"{NAME}/{content_hash(row).removeprefix('sha256:')[:16]}"
    return Task(key=key, prompt=messages_text(row["prompt"], "prompt"), provenance=Provenance(source=NAME))


def write_row(task: Task) -> Row:
    """For `GRPOTrainer(environment_factory=environment_factory())`, which finds the task in `nano_task`."""
    return {"prompt": [{"role": "user", "content": task.prompt}], "task_key": task.key}


TRL = RowFormat(
    name=NAME, summary="TRL datasets for the environment class nano_formats.trl",
    recognises=lambda row: "prompt" in row, read_row=read_row, write_row=write_row,
    understood=frozenset({"prompt", "task_key"}),
)  # fmt: skip


_TYPES: dict[str, type] = {"string": str, "integer": int, "number": float, "boolean": bool}


def environment_class(
    tools: Sequence[str] | None = None, *, sandbox: Sandbox | None = None, store: LogStore | None = None
) -> type:
    """A class of environments with a method a tool (default: the profile's). Raises ConfigError."""
    names = [tool.name for tool in PROFILE.tools] if tools is None else list(tools)
    methods = {name: _method(TOOLS.find(name).spec) for name in names}
    places = {"_sandbox": sandbox or open_sandbox(), "_store": store or redacting_store(LogStore.open())}
    return type("NanoEnvironment", (_Environment,), methods | places)


class _Environment:
    """One rollout at a time: `reset` begins the next one."""

    _sandbox: Sandbox
    _store: LogStore

    def __init__(self) -> None:
        self._episode: Episode | None = None

    def __del__(self) -> None:
        if self._episode is not None:
            self._episode.close()

    def reset(self, **row: Any) -> str | None:
        """Start the task of a dataset row. Raises UsageError for a row without one."""
        if self._episode is not None:
            self._episode.close()
        if WHOLE not in row:
            raise UsageError(f"the row has no column {WHOLE}; write it with nano-rl tasks export --to trl")
        self._episode = Episode(embedded(row), self._sandbox, self._store, actor="trl")
        return None

    def get_reward(self) -> float | None:
        """The reward of the hidden checks; None, which TRL ignores, if grading failed."""
        if self._episode is None:
            return None
        verdict = self._episode.finish()
        return None if verdict is None else verdict.reward

    def _act(self, name: str, arguments: dict[str, Any]) -> str:
        if self._episode is None:
            raise UsageError("call reset with a row of the dataset first")
        try:
            return self._episode.act(name, arguments).text
        except EpisodeOver as over:
            return f"error: {over}"


def _method(tool: ToolSpec) -> Callable[..., str]:
    """A typed method with a docstring in Google's form, from which TRL makes the tool's schema."""

    def call(self: _Environment, **arguments: Any) -> str:
        return self._act(tool.name, {key: v for key, v in arguments.items() if v is not None})

    required = tool.parameters.get("required", [])
    schemas: dict[str, Any] = tool.parameters.get("properties", {})
    types = {name: _type(schema) for name, schema in schemas.items()}
    ordered = sorted(schemas, key=lambda name: name not in required)
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(n, kind, annotation=types[n], default=empty if n in required else None)
        for n in ordered
    ]
    arguments = "\n".join(f"    {name}: The {name} of the call." for name in ordered)
    call.__name__ = call.__qualname__ = tool.name
    call.__doc__ = f"{tool.description}\n\nArgs:\n{arguments}\n\nReturns:\n    What the tool shows."
    call.__annotations__ = {**types, "return": str}
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("self", kind), *parameters], return_annotation=str
    )
    return call


def _type(schema: dict[str, Any]) -> Any:
    options = [option.get("type") for option in schema.get("anyOf", [schema])]
    found = [_TYPES[option] for option in options if option in _TYPES]
    kind: Any = found[0] if found else str
    return kind | None if "null" in options else kind
