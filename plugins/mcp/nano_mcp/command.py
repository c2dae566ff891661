"""`nano-coder mcp`: MCP servers whose tools the agent gets, and nano as one."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
from pydantic import ValidationError
from typer import Argument, Option

from nano_coder.config import AgentConfig, load_config, settings_of, task_limits, user_config_path
from nano_mcp.settings import McpServer, McpSettings
from nano_shared.command_line import JsonOption, lazy_app
from nano_shared.errors import ConfigError, UsageError
from nano_shared.files import content_hash, user_path, write_text
from nano_shared.printable import one_line, printable

if TYPE_CHECKING:
    import mcp_types

    from nano_mcp.connection import McpConnection

command = lazy_app(
    "nano-coder.mcp",
    {
        "list": (f"{__name__}:list_servers", "The configured servers."),
        "add": (f"{__name__}:add", "Write a server into your configuration."),
        "inspect": (f"{__name__}:inspect", "The tools of a server, with their schemas."),
        "test": (f"{__name__}:try_server", "Start a server, and call one of its tools."),
        "serve": (f"{__name__}:serve_here", "Offer run, diff, apply, log and exec to an MCP client."),
    },
    help="MCP servers: their tools for the agent, and nano as one.",
)
DirectoryOption = Annotated[Path, Option("-C", metavar="DIR", help="Where the work is.")]
ServerName = Annotated[str, Argument(metavar="NAME", help="The server's name.")]


def _configured(directory: Path) -> tuple[AgentConfig, McpSettings]:
    config = load_config({}, directory)[0]
    return config, settings_of(config, "mcp", McpSettings)


def list_servers(directory: DirectoryOption = Path(), as_json: JsonOption = False) -> int:
    """The servers of your configuration, and of a project that you trust; no server is started."""
    servers = _configured(directory)[1].servers
    if as_json:
        print(json.dumps({name: _settings_without_values(server) for name, server in servers.items()}))
        return 0
    for name, server in servers.items():
        how = server.url or " ".join((str(server.command), *server.args))
        print(printable(f"{name:16} {'' if server.enabled else '(off) '}{one_line(how, 200)}"))
    if not servers:
        print("no servers; nano-coder mcp add NAME -- COMMAND adds one", file=sys.stderr)
    return 0


def _settings_without_values(server: McpServer) -> dict[str, Any]:
    """The settings of a server, without the values of its variables."""
    shown = server.model_dump(exclude_defaults=True)
    return shown | ({"env": dict.fromkeys(server.env, "(set)")} if server.env else {})


def add(
    name: ServerName,
    argv: Annotated[
        list[str] | None, Argument(metavar="[-- COMMAND ARGS...]", help="A server over standard streams.")
    ] = None,
    url: Annotated[str | None, Option(help="A server over Streamable HTTP, instead of a command.")] = None,
    env: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A variable of the command; repeatable.")
    ] = None,
    folder: Annotated[
        list[str] | None,
        Option(metavar="DIR", help="A folder that its jail sees, where it is installed; repeatable."),
    ] = None,
    net: Annotated[str | None, Option(metavar="allow=HOST,...", help="Hosts that it may reach.")] = None,
    token: Annotated[
        str | None, Option("--bearer-token-env-var", metavar="NAME", help="Variable with the URL's token.")
    ] = None,
) -> int:  # fmt: skip
    """Write [mcp.servers.NAME] into your configuration. It is not started; `mcp test NAME` does that."""
    if malformed := [pair for pair in env or () if "=" not in pair]:
        raise UsageError(f"--env {malformed[0]}: write NAME=VALUE")
    body: dict[str, Any] = {
        "command": argv[0] if argv else None, "args": (argv or [])[1:], "url": url,
        "env": dict(pair.split("=", 1) for pair in env or ()),
        "folders": [str(user_path(each).absolute()) for each in folder or ()], "net": net,
        "bearer_token_env_var": token,
    }  # fmt: skip
    table = {"mcp": {"servers": {name: {key: value for key, value in body.items() if value}}}}
    try:
        McpSettings.model_validate(table["mcp"])
    except ValidationError as problem:
        raise UsageError(problem.errors()[0]["msg"].removeprefix("Value error, ")) from None
    path = user_config_path()
    if name in _configured(Path())[1].servers:
        raise UsageError(f"there is a server {name!r} already; edit {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # put at the end, so that comments and order of the file stay
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, f"{before.rstrip()}\n\n{tomli_w.dumps(table)}".lstrip(), ConfigError)
    print(printable(f"{path}: added {name}; nano-coder mcp test {name} starts it"))
    return 0


def inspect(name: ServerName, directory: DirectoryOption = Path(), as_json: JsonOption = False) -> int:
    """Start a server as a run does, and show its tools as it describes them, with their hashes."""
    from nano_mcp.connection import McpFailure

    server, connection, _ = _started(name, directory)
    try:
        tools = [_tool(each, server) for each in connection.tools()]
        protocol, instructions = connection.client.protocol_version, connection.client.instructions
    except McpFailure as problem:
        raise ConfigError(f"the MCP server {name}: {problem}") from None
    finally:
        connection.close()
    if as_json:
        result = {"server": name, "protocol": protocol, "instructions": instructions, "tools": tools}
        print(json.dumps(result))
        return 0
    print(printable(f"{name}: protocol {protocol}, {len(tools)} tools"))
    for each in tools:
        off = "" if each["offered"] else "  (not offered)"
        print(printable(f"\n{each['name']}{off}  {each['hash']}\n  {each['description']}"))
        print(printable(f"  {json.dumps(each['parameters'], ensure_ascii=False)}"))
    return 0


def _tool(listed: mcp_types.Tool, server: McpServer) -> dict[str, Any]:
    described = {"description": listed.description or "", "parameters": listed.input_schema}
    offered = server.offers(listed.name)
    return {"name": listed.name, "offered": offered, "hash": content_hash(described), **described}


def try_server(
    name: ServerName,
    tool: Annotated[str | None, Argument(help="A tool to call.")] = None,
    arguments: Annotated[str, Argument(help="Its arguments, as JSON.")] = "{}",
    directory: DirectoryOption = Path(),
) -> int:
    """Start a server as a run does, and call TOOL if one is named: exit code 1 where the call fails."""
    from nano_mcp.connection import McpFailure
    from nano_mcp.tools import answer_text

    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as problem:
        raise UsageError(f"the arguments are no JSON: {problem}") from None
    if not isinstance(given, dict):
        raise UsageError('the arguments are a JSON object, as in {"path": "a.txt"}')
    _, connection, seconds = _started(name, directory)
    try:
        known = [each.name for each in connection.tools()]
        print(f"{name} answered after {seconds:.1f} s with {len(known)} tools", file=sys.stderr)
        if tool is None:
            return 0
        if tool not in known:
            raise UsageError(f"{name} has no tool {tool!r}; it has {', '.join(known)}")
        answer = connection.call(tool, given)
    except McpFailure as problem:
        raise ConfigError(f"the MCP server {name}: {problem}") from None
    finally:
        connection.close()
    print(printable(answer_text(answer)))
    return 1 if answer.is_error else 0


def _started(name: str, directory: Path) -> tuple[McpServer, McpConnection, float]:
    """A connection to a configured server, on no files, and the seconds that it took to answer."""
    from nano_coder.sandbox.protocol import open_sandbox
    from nano_mcp.connection import McpConnection, McpFailure

    config, settings = _configured(directory)
    server = settings.servers.get(name)
    if server is None:
        known = ", ".join(settings.servers) or "none"
        raise UsageError(f"no MCP server {name!r}; there are {known}")
    began = time.monotonic()
    try:
        sandbox = open_sandbox(config.sandbox, python=config.python, image=config.image)
        connection = McpConnection(name, server, sandbox, task_limits(config))
    except McpFailure as problem:
        raise ConfigError(f"the MCP server {name}: {problem}") from None
    return server, connection, time.monotonic() - began


def serve_here(directory: DirectoryOption = Path()) -> int:
    """Serve an MCP client over standard input and output, until it hangs up.

    It gets the tools run, diff, apply, log and exec, which work in DIR alone. The model and all else are
    those of your configuration.
    """
    from nano_mcp.served import serve

    if not directory.is_dir():
        raise UsageError(f"no such directory: {directory}; -C names the directory to work in")
    serve(directory)
    return 0
