"""The Tool type, a typed function on a jail with its schema read from the signature; the tools there are."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from nano_coder.config import TABLES, AgentConfig
from nano_coder.sandbox.protocol import ExecResult, Jail, RunOptions, Sandbox, SupportsKeeping
from nano_shared.errors import ConfigError, NanoError, UsageError
from nano_shared.extension_points import (
    Extensions,
    absolute_reference,
    call_extension,
    described,
    is_reference,
    refuse_missing,
    takes,
)
from nano_shared.files import content_hash
from nano_shared.store import LogStore
from nano_shared.types import ImageRef, Limits, Observation, ToolCall, ToolSpec, Trajectory

if TYPE_CHECKING:
    from nano_coder.config import SearchSettings
    from nano_shared.agent_notes import Notes


C = TypeVar("C", bound="Closable")
_SURROGATE = re.compile("[\ud800-\udfff]")
_EXPLANATIONS = frozenset(
    {"comment", "description", "explanation", "justification", "purpose", "rationale", "reason", "reasoning",
     "security_risk", "summary", "task_progress", "thought", "thoughts", "title"}
)  # fmt: skip
"""arguments that models add to say why they call"""
_PER_CORE = 4
_at_once = threading.BoundedSemaphore(_PER_CORE * len(os.sched_getaffinity(0)))
"""limits the commands of this process that run at once; waiting does not count as their time. A group's
agents start alike: forty test suites at once on two cores take 20 s each, and some reach the 30 s limit."""


class Closable(Protocol):
    def close(self) -> None: ...


class HeldOpen:
    """What the tools of one run keep open between calls, by name, until the run ends."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def get(self, name: str, opener: Callable[[], C]) -> C:
        """What is held under the name, opened first if nothing is."""
        if name not in self._held:
            self._held[name] = opener()
        found: C = self._held[name]
        return found

    def drop(self, name: str) -> None:
        self._held.pop(name).close()

    def close(self) -> None:
        while self._held:
            self.drop(next(iter(self._held)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool may use: the jail and its limits, and of the world beside it what the user allowed."""

    jail: Jail
    limits: Limits
    sandbox: Sandbox | None = None
    """opens further jails"""
    held: HeldOpen = field(default_factory=HeldOpen)
    network: str = "none"
    """none, or allow=HOST,...: hosts that the jail may reach"""
    notes: Notes | None = None
    """what the agent remembers of the project; None where it may not"""
    search: SearchSettings | None = None
    """where `web_search` looks; None is the workspace's own library"""
    check: str | None = None
    """shell line that grades the task, where the agent may know it"""
    run_id: str = ""
    turn: int = 0
    """index of the turn that calls"""

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        """Run a program in the jail. Raises ToolFailure for arguments that no program can be given."""
        with _failing(), _at_once:
            return self.jail.run(argv, **options)

    def run_python(
        self, source: str, argv: Sequence[str] = (), *, isolated: bool = False, **options: Unpack[RunOptions]
    ) -> ExecResult:
        """Run Python source in the jail. Raises ToolFailure as `run` does."""
        with _failing(), _at_once:
            return self.jail.run_python(source, argv, isolated=isolated, **options)

    def keep(self) -> bool:
        """Keep processes and /tmp from now on; False where the sandbox does not."""
        return isinstance(self.jail, SupportsKeeping) and self.jail.keep()


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except UsageError as problem:
        raise ToolFailure(str(problem)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """A tool's result: the text for the model before truncation, and the facts."""

    text: str
    ok: bool = True
    execution: ExecResult | None = None
    finished: bool = False
    """the agent declared the task done"""
    answer: str | None = None
    repairs: tuple[str, ...] = ()
    """liberties that the tool took with the call, by name"""
    images: tuple[tuple[ImageRef, bytes], ...] = ()
    """with the text, for a model that sees: each with the bytes of its file"""


class _Raised(NanoError):
    """Code of users raised what is no ToolFailure."""


class ToolFailure(Exception):
    """A tool could not do what was asked; the message is shown to the model."""


_MISSING = re.compile(r"no such (?:file|directory|file or directory): (.+?)(?:\. Nothing was changed\.)?")
_NEAREST = """
import difflib, os, sys

wanted, found = os.path.normpath(sys.argv[1]), []
base = os.path.basename(wanted)


def ending(path):
    # how many of the last parts are the wanted ones
    pairs = list(zip(reversed(path.lower().split("/")), reversed(wanted.lower().split("/"))))
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(pairs))


for folder, folders, names in os.walk("."):
    folders[:] = sorted({*folders} - {".git", ".nano", "__pycache__", "node_modules"})
    found += [os.path.normpath(os.path.join(folder, name)) for name in [*folders, *names]]
    if len(found) > 20_000:
        break
names = sorted({os.path.basename(path) for path in found})
close = {name: -n for n, name in enumerate(difflib.get_close_matches(base, names, 3, 0.8))}
same = [path for path in found if ending(path) or os.path.basename(path) in close]
same.sort(key=lambda path: (-ending(path), -close.get(os.path.basename(path), 0), len(path), path))
like = lambda path: difflib.SequenceMatcher(None, wanted, path, False).ratio()
same = sorted(same[:200], key=lambda p: (-ending(p), -close.get(os.path.basename(p), 0), -like(p), len(p), p))
near = [os.fsencode(path).decode("utf-8", "backslashreplace") for path in same[:3]]
print(", ".join(map(repr, near)))
"""


def _near(context: ToolContext, message: str) -> str:
    """Paths of the workspace that may be meant where a failure is that of a path which does not exist."""
    missing = _MISSING.fullmatch(message)
    return near_paths(context, missing[1]) if missing else ""


def near_paths(context: ToolContext, path: str) -> str:
    """Note of the paths that are nearest to one which does not exist; empty where none is."""
    if "\0" in path or len(path) > 1000:
        return ""
    done = context.run_python(_NEAREST, [path], isolated=True)
    said = done.stdout.decode("utf-8", "replace").strip() if done.ok else ""
    return f"; near it: {said}" if said else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A typed function that the agent may call. `tool` makes one; `nano.tools` registers it."""

    spec: ToolSpec
    arguments: type[BaseModel]
    function: Callable[..., ToolResult | str]
    mutates: bool
    """may change the workspace, so a snapshot follows"""
    recorded: bool = False
    """depends on more than the workspace, so that a fork takes its answer from the log where the parent's run
    has one to an equal call"""

    def __call__(self, context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        """Validate the arguments and run. `null` for an optional argument counts as not given; an unknown one
        is ignored, with a note, where that changes nothing. Raises ToolFailure with the error and the right
        usage, and for any exception or result of a wrong type of a tool that is not ours."""
        known = self.arguments.model_fields
        ignored = [key for key in arguments if key not in known and self._harmless(key)]
        try:
            values = self.arguments.model_validate(
                {
                    key: value
                    for key, value in arguments.items()
                    if key not in ignored
                    and not (value is None and key in known and not known[key].is_required())
                }
            )
        except ValidationError as problem:
            raise ToolFailure(self._explain(problem)) from None
        given = {key: getattr(values, key) for key in self.arguments.model_fields}
        for key, value in given.items():
            if isinstance(value, str) and _SURROGATE.search(value):
                raise ToolFailure(f"{key} holds half of a surrogate pair, which is no text")
        try:
            result = self._call(context, given)
        except ToolFailure as problem:
            raise ToolFailure(f"{problem}{_near(context, str(problem))}") from problem.__cause__
        if isinstance(result, str):
            result = ToolResult(text=result)
        if not isinstance(result, ToolResult):
            raise ToolFailure(f"{self.spec.name} returned a {type(result).__name__}, which is no text")
        if not ignored:
            return result
        note = f"[ignored, since it is no argument: {', '.join(ignored)}. Usage: {self._usage()}]"
        repairs = (*result.repairs, *(f"ignored {key}" for key in ignored))
        return replace(result, text=f"{result.text}\n{note}", repairs=repairs)

    def _harmless(self, key: str) -> bool:
        """Whether an unknown argument can be ignored: it explains the call, or the tool changes nothing and
        the name is not a known one misspelt."""
        if key in _EXPLANATIONS:
            return True
        return not self.mutates and not difflib.get_close_matches(key, self.arguments.model_fields, 1, 0.7)

    def _call(self, context: ToolContext, given: dict[str, Any]) -> object:
        try:
            # an argument may have any name, those of `call_extension` too
            return call_extension(
                partial(self.function, context, **given), name=f"tool {self.spec.name}", of=self.function,
                passing=(ToolFailure,), error=_Raised,
            )  # fmt: skip
        except _Raised as problem:
            raise ToolFailure(str(problem).removeprefix("tool ")) from problem.__cause__

    def _explain(self, problem: ValidationError) -> str:
        wrong = []
        for error in problem.errors():
            key = ".".join(str(part) for part in error["loc"])
            if error["type"] == "extra_forbidden":
                wrong.append(f"unknown argument {key}")
            elif error["type"] == "missing":
                wrong.append(f"{key} is missing")
            else:
                wrong.append(f"{key}: {error['msg'].lower()}")
        return f"{'; '.join(wrong)}. Usage: {self._usage()}"

    def _usage(self) -> str:
        """The call with its arguments, the optional ones marked."""
        known = self.arguments.model_fields.items()
        return f"{self.spec.name}({', '.join(k if field.is_required() else f'{k}?' for k, field in known)})"


def tool(
    *, body: str | None = None, mutates: bool = False, recorded: bool = False
) -> Callable[[Callable[..., ToolResult | str]], Tool]:
    """Makes a Tool of a function `f(context, **arguments)`, with its name, schema and description.

    It returns a ToolResult, or text where there is no more to say. `body` is the argument that the compact
    dialect writes below the call; `recorded`: forks take its answers from the log. Raises ConfigError for a
    function whose arguments give no schema.
    """

    def build(function: Callable[..., ToolResult | str]) -> Tool:
        name = function.__name__
        model = _arguments(name, function)
        if body is not None and body not in model.model_fields:
            raise ConfigError(f"tool {name!r} has no argument {body!r} to be its body")
        spec = ToolSpec(
            name=name,
            description=(inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " "),
            parameters=_plain_schema(model),
            body=body,
        )
        return Tool(spec=spec, arguments=model, function=function, mutates=mutates, recorded=recorded)

    return build


def _arguments(name: str, function: Callable[..., ToolResult | str]) -> type[BaseModel]:
    """The arguments after the context as a model. Raises ConfigError."""
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise ConfigError(f"tool {name!r} takes nothing: its first argument is the ToolContext")
    try:
        hints = get_type_hints(function)
    except NameError as problem:
        raise ConfigError(f"tool {name!r}: an annotation cannot be read: {problem}") from None
    fields: dict[str, Any] = {}
    for p in parameters[1:]:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name!r}: {p} cannot be given by name; list the arguments one by one")
        if p.name not in hints:
            raise ConfigError(f"tool {name!r}: its argument {p.name!r} has no type annotation")
        fields[p.name] = (hints[p.name], ... if p.default is p.empty else p.default)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except (PydanticUserError, NameError) as problem:
        reason = str(problem).splitlines()[0]
        raise ConfigError(f"tool {name!r}: its arguments have no JSON schema: {reason}") from None
    return model


def _plain_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema without pydantic's titles, which would cost tokens, and without references."""
    schema = model.model_json_schema()
    known = schema.get("$defs", {})
    properties = {
        key: {k: _inlined(v, known) for k, v in value.items() if k != "title"}
        for key, value in schema.get("properties", {}).items()
    }
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def _inlined(part: Any, known: dict[str, Any]) -> Any:
    """A part of a schema with what its references name in their place, without titles."""
    if isinstance(part, list):
        return [_inlined(one, known) for one in part]
    if not isinstance(part, dict):
        return part
    if isinstance(name := part.get("$ref"), str):
        return _inlined(known[name.rpartition("/")[2]], known)
    named = {k: {n: _inlined(p, known) for n, p in v.items()} for k, v in part.items() if k == "properties"}
    return {k: _inlined(v, known) for k, v in part.items() if k not in ("title", "properties")} | named


def object_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with what every dialect looks for: an object with properties and required ones."""
    properties = schema.get("properties")
    required = schema.get("required")
    return {
        **{key: value for key, value in schema.items() if key not in ("$schema", "$id", "title")},
        "type": "object",
        "properties": {name: _parameter(body) for name, body in properties.items()}
        if isinstance(properties, dict)
        else {},
        "required": [name for name in required if isinstance(name, str)]
        if isinstance(required, list)
        else [],
    }


def _parameter(schema: Any) -> Any:
    """A parameter's schema in the words that dialects read: an object, with one type or anyOf of several."""
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        return schema
    options = schema.get("anyOf")
    if isinstance(options, list):
        return {**schema, "anyOf": [_parameter(option) for option in options]}
    if isinstance(kinds := schema.get("type"), list):
        rest = {key: value for key, value in schema.items() if key != "type"}
        return {**rest, "anyOf": [{"type": kind} for kind in kinds]}
    return schema


LARGEST_IMAGE = 20 << 20
"""bytes of an image's file"""
IMAGES: Extensions[Callable[[bytes, str], ImageRef]] = Extensions("nano.images")
"""`reader`: what an image's file holds, by bytes and name; raises UsageError for what no model is shown"""


def load_image(path: Path, store: LogStore) -> ImageRef:
    """An image's file, kept among the log's blobs as it is. Raises UsageError for what no model is shown."""
    refuse_missing(IMAGES.group, "reader")
    if not path.is_file():
        raise UsageError(f"no such image file: {path}; a container image is named by --container-image")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_IMAGE + 1)
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}") from None
    image = IMAGES.find("reader")(data, str(path))
    store.blobs.put(data)
    return image


class Tools(Extensions[Tool]):
    """Tools by name. One that lies in a file has a name once it was given as `path.py:name`."""

    def __init__(self) -> None:
        super().__init__("nano.tools", check=_problem)
        self._given: dict[str, tuple[str, Tool]] = {}
        """name -> source, and the tool: of a file, or made by this process"""

    @property
    def files(self) -> tuple[str, ...]:
        """What was given as `path.py:name` in this process, with absolute paths."""
        return tuple(source for source, _ in self._given.values() if is_reference(source))

    def find(self, name: str) -> Tool:
        """The tool of that name. Raises ConfigError for one that is not at hand or cannot be loaded."""
        if name in self._given:
            return self._given[name][1]
        found = super().find(name)
        if not is_reference(name) and found.spec.name != name:
            raise ConfigError(f"the tool {found.spec.name!r} is registered in nano.tools as {name!r}")
        return found

    def give(self, reference: str) -> Tool:
        """A tool by its name or `path.py:name`, which from now on has a name in this process.

        Raises ConfigError as `find` does, and where another tool has its name; UsageError for a tool of a
        plug-in that is missing.
        """
        refuse_missing(self.group, reference)
        found = self.find(reference)
        if is_reference(reference):
            name = found.spec.name
            if name in self and self.find(name) is not found:
                raise ConfigError(f"{reference}: there is another tool called {name!r}; rename the function")
            self._given[name] = (absolute_reference(reference), found)
        return found

    def add(self, made: Tool, source: str = "this process") -> None:
        """Give a tool that this process made, such as one of an MCP server, its name; replaces an earlier."""
        self._given[made.spec.name] = source, made

    def source(self, name: str) -> str:
        """Where a tool comes from: a file, the package that registers it, or what made it."""
        return self._given[name][0] if name in self._given else super().source(name)

    def __contains__(self, name: object) -> bool:
        return name in self._given or super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._given

    def __len__(self) -> int:
        return super().__len__() + len(self._given)


def _problem(value: object) -> str | None:
    if isinstance(value, Tool):
        return None
    return f"is {described(value)}, and no Tool: put @tool() of nano_coder.tools above the function"


TOOLS = Tools()


class RecordedAnswers:
    """The answers that forks of a logged run get, by call; equal calls are answered in their order."""

    def __init__(self, run: Trajectory, get_blob: Callable[[str], bytes], after: int):
        """`after` turns are those that a fork begins with: their answers are used already."""
        self._get_blob = get_blob
        self._answers: dict[str, deque[Observation]] = defaultdict(deque)
        for turn in run.turns:
            for call, observation in zip(turn.calls, turn.observations, strict=False):
                if turn.index >= after and call.name in TOOLS and TOOLS.find(call.name).recorded:
                    self._answers[_key(call)].append(observation)

    def take(self, call: ToolCall) -> ToolResult | None:
        """The next answer to the call; None where the log has none."""
        left = self._answers.get(_key(call))
        if not left:
            return None
        observation = left.popleft()
        text = observation.text
        if observation.blob is not None:
            text = self._get_blob(observation.blob).decode()
        return ToolResult(text=text, ok=observation.ok)


def _key(call: ToolCall) -> str:
    return content_hash([call.name, dict(call.arguments)])


Place = Callable[[], tuple[Sandbox, LogStore]]
"""opens the sandbox of the runs, and their log"""


class RunTools(Protocol):
    """Brings tools that only this process knows, such as those of servers that the configuration names."""

    def __call__(self, config: AgentConfig, place: Place) -> Sequence[Tool]:
        """The tools, with names that no other has. It opens the place only if the configuration asks for
        any. What is left out it says on stderr. Raises ConfigError for what is required and not there."""
        ...


RUN_TOOLS: Extensions[RunTools] = Extensions(
    "nano.run_tools", check=lambda value: takes(value, "config", "place")
)


def further_tools(config: AgentConfig, place: Place) -> list[str]:
    """Names of the further tools. They are then in the registry.

    Raises ConfigError for a tool that is not there, and as `RunTools` do.
    """
    given = [TOOLS.give(tool) for tool in config.tools]
    for name in RUN_TOOLS:
        if name in TABLES and getattr(config, name) == TABLES[name].model():
            continue  # of a plug-in whose settings nobody has set
        brought: Sequence[Tool] = call_extension(
            RUN_TOOLS[name], config, place, name=f"nano.run_tools {name}"
        )
        for tool in brought:
            mcp = tool.spec.name.startswith("mcp__")
            TOOLS.add(tool, f"MCP server {tool.spec.name.split('__')[1]}" if mcp else name)
        given += brought
    return [tool.spec.name for tool in given]
