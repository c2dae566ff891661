"""The tools of MCP servers in the registry of tools, as `mcp__SERVER__TOOL`.

A server's schemas and texts are a stranger's: schemas are checked before they are shown, arguments are
validated here, and answers are bounded and made printable.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from nano_coder.config import AgentConfig, settings_of, task_limits
from nano_coder.sandbox.jail_request import Output
from nano_coder.sandbox.protocol import Sandbox
from nano_coder.tools.tool import Place, Tool, ToolContext, ToolFailure, ToolResult, object_schema
from nano_mcp.connection import McpConnection, McpFailure
from nano_mcp.settings import McpServer, McpSettings
from nano_shared.errors import ConfigError
from nano_shared.printable import one_line, printable, terminal_text
from nano_shared.store import LogStore
from nano_shared.types import Limits, ToolSpec

if TYPE_CHECKING:
    import mcp_types

_LONGEST_NAME = 64
"""characters that APIs allow"""
_LONGEST_DESCRIPTION = 2000
_LARGEST_SCHEMA = 20_000
"""bytes of JSON: each run's prompt holds it"""
_MOST_STARTS = 3
"""of one server in one run"""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTool(Tool):
    """A tool of a server. Its arguments are validated against the server's own schema."""

    problems: Callable[[Any], list[str]]

    def __call__(self, context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        arguments = _without_nulls(arguments, self.spec.parameters)
        if wrong := self.problems(arguments):
            usage = ", ".join(_usage(self.spec.parameters))
            raise ToolFailure(f"{'; '.join(wrong)}. Usage: {self.spec.name}({usage})")
        result = self.function(context, **{"arguments": arguments})
        assert isinstance(result, ToolResult)
        return result


def _without_nulls(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The arguments without an optional one that is null where its schema has a type that is none."""
    known = schema.get("properties", {})

    def kept(key: str, value: Any) -> bool:
        given = known.get(key, {}) if isinstance(known, dict) else {}
        kind = given.get("type", "null") if isinstance(given, dict) else "null"
        return value is not None or key in schema.get("required", ()) or "null" in kind

    return {key: value for key, value in arguments.items() if kept(key, value)}


def tools_of_servers(config: AgentConfig, place: Place) -> list[Tool]:
    """The tools of the configured servers. What is left out, and what a server changed since runs saw it,
    stderr says. Raises ConfigError for a required server that cannot be used."""
    servers = settings_of(config, "mcp", McpSettings).servers
    if not servers:
        return []
    sandbox, store = place()
    served = offer_servers(servers, sandbox, task_limits(config), _warn)
    for change in filter(None, (_change(tool.spec, store) for tool in served)):
        _warn(change)
    return served


def _warn(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)


def _change(tool: ToolSpec, store: LogStore) -> str | None:
    """What a server changed of a tool since runs were last given it: a description can be poisoned."""
    earlier = store.earlier_tool(tool)
    if earlier is None:
        return None
    before, since = earlier
    parts = [name for name in ("description", "parameters") if getattr(tool, name) != getattr(before, name)]
    server = tool.name.split("__")[1]
    return (
        f"the tool {tool.name} has another {' and other '.join(parts)} than runs were given since"
        f" {datetime.fromtimestamp(since):%Y-%m-%d}; nano-coder mcp inspect {server} shows it"
    )


def offer_servers(
    servers: Mapping[str, McpServer], sandbox: Sandbox, limits: Limits, warn: Callable[[str], None]
) -> list[Tool]:
    """The tools of enabled servers; one that fails is left out, or, if required, a ConfigError."""
    enabled = {name: server for name, server in servers.items() if server.enabled}
    offered: list[Tool] = []
    with ThreadPoolExecutor(max(1, len(enabled))) as pool:  # each takes seconds to start
        start = pool.submit
        listings = {n: start(list_tools, n, each, sandbox, limits) for n, each in enabled.items()}
    for name, server in enabled.items():
        try:
            offered += made_tools(name, server, listings[name].result(), warn)
        except McpFailure as problem:
            if server.required:
                raise ConfigError(f"the MCP server {name} is required: {problem}") from None
            warn(f"the MCP server {name} is left out: {problem}; nano-coder mcp test {name} tries again")
    return offered


def list_tools(name: str, server: McpServer, sandbox: Sandbox, limits: Limits) -> list[mcp_types.Tool]:
    """The tools of a server, from a process of its own. Raises McpFailure and SandboxError."""
    connection = McpConnection(name, server, sandbox, limits)
    try:
        return connection.tools()
    finally:
        connection.close()


def made_tools(
    name: str, server: McpServer, listed: Sequence[mcp_types.Tool], warn: Callable[[str], None]
) -> Iterator[Tool]:
    """The tools that the agent may call; what no model can call is left out with a warning."""
    taken: set[str] = set()
    for each in listed:
        if not server.offers(each.name):
            continue
        full = tool_name(name, each.name)
        schema = object_schema(each.input_schema)
        reason = "its name is another's too" if full in taken else _unusable(schema)
        if reason is not None:
            warn(f"the MCP server {name}: its tool {one_line(each.name, 80)} is left out: {reason}")
            continue
        taken.add(full)
        description = " ".join(printable(each.description or "", _LONGEST_DESCRIPTION).split())
        spec = ToolSpec(name=full, description=description, parameters=schema)
        yield McpTool(
            spec=spec,
            arguments=BaseModel,
            function=_caller(name, server, each.name),
            # a server in a jail works on the run's files; one behind a URL cannot reach them
            mutates=server.command is not None,
            recorded=server.command is None,
            problems=_validator(schema),
        )


def tool_name(server: str, tool: str) -> str:
    """`mcp__SERVER__TOOL` in the characters that APIs allow; a name that is too long ends with a hash."""
    name = f"mcp__{server}__{re.sub('[^A-Za-z0-9_-]', '_', tool)}"
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}_{hashlib.sha256(tool.encode()).hexdigest()[:8]}"


def _caller(name: str, server: McpServer, tool: str) -> Callable[..., ToolResult]:
    def call(context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
        try:
            answer = _connection(context, name, server).call(tool, arguments)
        except McpFailure as problem:
            said = f"error: the MCP server {name} failed: {printable(str(problem))}"
            return ToolResult(text=said, ok=False)
        text = printable(terminal_text(_bounded(answer_text(answer), context.limits.output_bytes)), None)
        return ToolResult(text=text or "[no output]", ok=not answer.is_error)

    return call


class _Starts:
    """The connection of a run to one server, and how often the server was started."""

    def __init__(self) -> None:
        self.number = 0
        self.connection: McpConnection | None = None

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


def _connection(context: ToolContext, name: str, server: McpServer) -> McpConnection:
    """The run's connection to the server; a server that has ended is started again. Raises McpFailure."""
    starts = context.held.get(f"mcp:{name}", _Starts)
    if starts.connection is not None and starts.connection.alive:
        return starts.connection
    starts.close()
    if starts.number >= _MOST_STARTS:
        raise McpFailure(f"it was started {starts.number} times and ended each time; do without it")
    starts.number += 1
    starts.connection = None
    if context.sandbox is None:
        raise McpFailure("nothing can be started here")
    starts.connection = McpConnection(name, server, context.sandbox, context.limits, context.jail)
    return starts.connection


def answer_text(answer: mcp_types.CallToolResult) -> str:
    """An answer as text; of pictures and sound their kind and size."""
    parts = [_block_text(block) for block in answer.content]
    if not parts and answer.structured_content is not None:
        parts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _block_text(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"[{block.type}: {block.mime_type}, {len(block.data) * 3 // 4} bytes]"
        case "resource" if hasattr(block.resource, "text"):
            return str(block.resource.text)
        case "resource":
            return f"[resource: {block.resource.uri}, {len(block.resource.blob) * 3 // 4} bytes]"
    return f"[{block.type}: {getattr(block, 'uri', '')}]"


def _bounded(text: str, most: int) -> str:
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= most:
        return data.decode()
    kept = Output(most)
    kept.feed(data)
    return f"[{len(data)} bytes, cut to {most}]\n{kept.value().decode('utf-8', 'replace')}"


# ---------------------------------------------------------------------------------------- schemas


def _unusable(schema: dict[str, Any]) -> str | None:
    """Why no model can call a tool of that schema; None where one can."""
    from jsonschema import Draft202012Validator, SchemaError

    try:
        size = len(json.dumps(schema))
        Draft202012Validator.check_schema(_without_patterns(schema))
        list(_validator(schema)({}))
    except SchemaError as problem:
        return f"its schema is none ({one_line(problem.message, 100)})"
    except RecursionError:
        return "its schema has no end"
    except ToolFailure as problem:
        return str(problem)
    if size > _LARGEST_SCHEMA:
        return f"its schema has {size} bytes, more than {_LARGEST_SCHEMA}"
    if not all(isinstance(body, (dict, bool)) for body in schema["properties"].values()):
        return "its schema is none"
    if hidden := [name for name in schema["required"] if name not in schema["properties"]]:
        return f"it requires {one_line(hidden[0], 40)!r}, which it does not describe"
    return None


def _validator(schema: dict[str, Any]) -> Callable[[Any], list[str]]:
    checked = _without_patterns(schema)

    def problems(arguments: Any) -> list[str]:
        from referencing.exceptions import Unresolvable

        validator = _validator_kind()(checked)
        wrong = []
        try:
            for error in validator.iter_errors(arguments):
                where = ".".join(str(part) for part in error.absolute_path)
                wrong.append(one_line(f"{where}: {error.message}" if where else error.message, 200))
                if len(wrong) == 5:
                    break
        except Unresolvable as problem:
            what = one_line(str(problem), 100)
            raise ToolFailure(f"its schema refers to what is not in it: {what}") from None
        except RecursionError:
            return ["the arguments are nested too deeply"]
        return wrong

    return problems


@cache
def _validator_kind() -> Any:
    """The validator of JSON Schema, with patterns matched in linear time and nothing fetched."""
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry

    kind = validators.extend(Draft202012Validator, {"pattern": _matches})
    return lambda schema: kind(schema, registry=Registry())


def _matches(_validator: Any, pattern: Any, value: Any, _schema: Any) -> Iterator[Any]:
    import re2
    from jsonschema import ValidationError

    if not isinstance(value, str) or not isinstance(pattern, str):
        return
    try:
        options = re2.Options()
        options.log_errors = False
        found = re2.compile(pattern, options).search(value.encode("utf-8", "replace").decode())
    except re2.error:  # looks ahead or behind: the server will say what is wrong
        return
    if not found:
        yield ValidationError(f"{value[:100]!r} does not match {pattern!r}")


def _without_patterns(schema: Any) -> Any:
    """The schema without patterns for names, which would be matched by an engine that may never end."""
    if isinstance(schema, list):
        return [_without_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return copy.copy(schema)
    left_out = {"patternProperties"}
    if "patternProperties" in schema:
        left_out |= {"additionalProperties", "unevaluatedProperties"}
    return {key: _without_patterns(value) for key, value in schema.items() if key not in left_out}


def _usage(schema: Mapping[str, Any]) -> Iterator[str]:
    for name in schema["properties"]:
        yield name if name in schema["required"] else f"{name}?"
