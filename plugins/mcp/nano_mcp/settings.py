"""Settings of MCP servers: `[mcp.servers.NAME]` of a configuration, and the `.mcp.json` of a project.

Both have the shape that other agents use. No value is expanded: a server gets what is written, and no secret
of the environment.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from nano_coder.config import HostsSetting, ProjectTable, SettingsTable
from nano_shared.errors import ConfigError

PROJECT_SERVERS = ".mcp.json"
_LOADING = re.compile(
    r"LD_.*|DYLD_.*|PYTHON(PATH|HOME|STARTUP|INSPECT)|NODE_OPTIONS|BASH_ENV|ENV|PERL5(LIB|OPT)|RUBYOPT"
)
"""variables by which one program makes another load its code"""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_EXPANSION = re.compile(r"\$\{\w+(:-[^}]*)?\}")


class McpServer(BaseModel):
    """One server: a command that runs in a jail, or a URL."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    command: str | None = None
    """program of a server that speaks over its standard streams; it runs in a jail"""
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field({}, repr=False)
    """variables beside HOME, LOGNAME, PATH, SHELL, TERM and USER; nothing in them is expanded"""
    cwd: str | None = None
    """folder in the jail, from the workspace; None is the workspace"""
    folders: tuple[str, ...] = ()
    """folders of this machine that its jail sees, read-only: where it is installed"""
    net: HostsSetting = "none"
    """none, or allow=HOST,...: hosts that the jail of a command may reach"""
    url: str | None = None
    """of a server that speaks Streamable HTTP"""
    bearer_token_env_var: str | None = None
    """variable that holds the token for the URL"""
    startup_timeout_sec: float = Field(30.0, gt=0, le=3600)
    tool_timeout_sec: float = Field(60.0, gt=0, le=86400)
    enabled: bool = True
    required: bool = False
    """whether nothing runs where the server cannot be started"""
    enabled_tools: tuple[str, ...] | None = None
    """the tools that the agent may call, with * and ?; None is all"""
    disabled_tools: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("say either command or url")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url = {self.url!r}: it begins with http:// or https://")
        return self

    @field_validator("env")
    @classmethod
    def _harmless(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if _LOADING.fullmatch(name):
                raise ValueError(f"env.{name} would load other code into the server; install that instead")
            if _EXPANSION.search(value):
                raise ValueError(
                    f"env.{name}: ${{...}} is not expanded, as no secret is passed on; write the value itself"
                )
        return env

    def offers(self, tool: str) -> bool:
        """Whether the agent may call the tool."""

        def named(patterns: tuple[str, ...]) -> bool:
            return any(fnmatch.fnmatchcase(tool, pattern) for pattern in patterns)

        return (self.enabled_tools is None or named(self.enabled_tools)) and not named(self.disabled_tools)

    def environment(self, jail_path: str) -> dict[str, str]:
        """The variables of the program: those of the jail's own user, never of this process."""
        own = {
            "HOME": "/tmp", "LOGNAME": "user", "PATH": jail_path, "SHELL": "/bin/sh",
            "TERM": os.environ.get("TERM", "dumb"), "USER": "user",
        }  # fmt: skip
        return {**own, **self.env}


class McpSettings(BaseModel):
    """MCP servers whose tools the agent gets, by name: [mcp.servers.NAME]."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    servers: dict[str, McpServer] = {}
    """by name: [mcp.servers.NAME] with command, args, env and cwd, or url and bearer_token_env_var"""

    @field_validator("servers")
    @classmethod
    def _names(cls, servers: dict[str, McpServer]) -> dict[str, McpServer]:
        for name in servers:
            if not _NAME.fullmatch(name) or "__" in name:
                raise ValueError(f"{name!r} is no name of a server: up to 32 letters, digits, - and single _")
        return servers

    @field_serializer("servers")
    def _served(self, servers: dict[str, McpServer]) -> dict[str, Any]:
        return {name: server.model_dump(exclude_defaults=True) for name, server in servers.items()}


def joined(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Servers of several layers add up; one replaces that of the same name."""
    return {"servers": below["servers"] | above.get("servers", {})}


def masked(settings: McpSettings, mark: str | None) -> McpSettings:
    """To be shown: the values of variables may be secrets."""
    servers = {}
    for name, server in settings.servers.items():
        hidden = {} if mark is None else dict.fromkeys(server.env, mark)
        servers[name] = server.model_copy(update={"env": hidden})
    return McpSettings(servers=servers)


def read_project_servers(path: Path, content: bytes) -> dict[str, dict[str, Any]]:
    """The servers of a `.mcp.json`, as `[mcp.servers]` would hold them. Raises ConfigError."""
    try:
        table = json.loads(content)
        found = table["mcpServers"]
        servers = {name: _project_server(name, dict(body)) for name, body in found.items()}
        McpSettings.model_validate({"servers": servers})
    except ValidationError as problem:
        error = problem.errors()[0]
        where = ".".join(str(part) for part in error["loc"][1:])
        raise ConfigError(f"{path}: {where}: {error['msg'].removeprefix('Value error, ')}") from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as problem:
        said = "it has no table mcpServers" if isinstance(problem, KeyError) else problem
        raise ConfigError(f"cannot read {path}: {said}") from None
    return servers


def _project_server(name: str, body: dict[str, Any]) -> dict[str, Any]:
    kind = body.pop("type", None)
    if kind not in (None, "stdio", "http", "streamable-http"):
        raise ValueError(f"{name}: type {kind!r} is not known; there are stdio and http")
    if body.pop("headers", None):
        raise ValueError(
            f"{name}: headers are not sent; write [mcp.servers.{name}] with bearer_token_env_var"
        )
    if beyond := sorted({"folders", "net", "bearer_token_env_var"} & body.keys()):
        raise ValueError(f"{name}: {beyond[0]} is not this file's to say; write it into your configuration")
    return body


TABLE = SettingsTable(
    model=McpSettings,
    joined=joined,
    masked=masked,
    project=ProjectTable(
        file=PROJECT_SERVERS,
        brings="MCP servers, which run in jails",
        read=lambda path, content: {"servers": read_project_servers(path, content)},
    ),
)
