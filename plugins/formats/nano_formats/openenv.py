"""Servers of OpenEnv: `--env openenv:URL`; a task is a seed of `reset`, a session is a WebSocket.

The action's schema is the one tool, `act`; of servers whose actions are calls of tools, those tools.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nano_coder.environment import EnvironmentSession
from nano_coder.tools.tool import ToolFailure, ToolResult
from nano_formats.remote import (
    CONNECT_SECONDS,
    LARGEST,
    HttpConnection,
    checked_url,
    object_of,
    specs_of,
    tries,
)
from nano_shared.errors import EnvironmentFailed, UsageError
from nano_shared.printable import one_line
from nano_shared.types import Limits, Split, ToolCall, ToolSpec, Trajectory

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection


class _Full(Exception):
    """The server has no session left."""


class OpenEnv:
    """One environment server."""

    def __init__(self, url: str, prompt: str | None = None, *, token_env_var: str | None = None) -> None:
        """`prompt` is the agent's task; None is the server's description of itself. Raises UsageError
        for a server of another kind, and where the package `websockets` is missing."""
        try:
            import websockets  # noqa: F401
        except ImportError:
            raise UsageError(
                "openenv: environments need the package websockets;"
                " pip install 'nano-rl-coder-formats[openenv]'"
            ) from None
        self._url, self._headers = checked_url(url, token_env_var)
        connection = HttpConnection(self._url, self._headers, 10.0)
        status, text = connection.get("/schema")
        if status in (404, 405):
            raise UsageError(f"{url} is no server of OpenEnv 0.10: GET /schema answered {status}")
        schema = object_of(f"{self._url}/schema", status, text)
        if not isinstance(schema.get("action"), dict):
            raise UsageError(f"{url} speaks another protocol than OpenEnv 0.10: /schema names no action")
        self._action: dict[str, Any] = schema["action"]
        status, text = connection.get("/metadata")
        connection.close()
        described = object_of(f"{self._url}/metadata", status, text) if status < 400 else {}
        self._prompt = prompt or str(described.get("description") or described.get("name") or "Act.")

    def tasks(self, split: Split, seed: int) -> Iterator[dict[str, Any]]:
        seeds = random.Random(f"openenv {split} {seed}")
        while True:
            chosen = seeds.randrange(2**31)
            yield {"prompt": self._prompt, "key": chosen, "reset": {"seed": chosen}}

    def start(self, row: Mapping[str, Any], limits: Limits) -> SocketSession:
        return SocketSession(self._url, self._headers, self._action, row["reset"], limits.tool_seconds)


class SocketSession(EnvironmentSession):
    """A session on its own connection, whose end the server notices."""

    tools: Sequence[ToolSpec] = ()

    def __init__(
        self, url: str, headers: Mapping[str, str], action: dict[str, Any], reset: Any, seconds: float
    ) -> None:
        self._host, self._seconds, self._rewards = url, seconds, 0.0
        self._by_tool = "tool_name" in action.get("properties", {})
        try:
            self._socket, first = tries(OSError, _Full)(self._open, headers, reset)
        except (OSError, _Full) as problem:
            raise EnvironmentFailed(
                f"{url} cannot be reached ({problem}); start that server, or give sessions=N, the most that"
                " it opens at a time"
            ) from None
        self.observation = _observation_text(first)
        self.tools = self._listed() if self._by_tool else [_act(action)]

    def step(self, call: ToolCall) -> ToolResult:
        action: dict[str, Any] = call.arguments
        if self._by_tool:
            action = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        seen = self._ask({"type": "step", "data": action})
        self._rewards += float(seen.get("reward") or 0)
        self.done = bool(seen.get("done"))
        return ToolResult(text=_observation_text(seen))

    def grade(self, run: Trajectory) -> float:
        """The sum of the rewards of its steps."""
        return self._rewards

    def close(self) -> None:
        self._socket.close()

    def _open(self, headers: Mapping[str, str], reset: Any) -> tuple[ClientConnection, dict[str, Any]]:
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage
        from websockets.sync.client import connect

        address = f"ws{self._host.removeprefix('http')}/ws"
        try:
            self._socket = connect(
                address, additional_headers=dict(headers), open_timeout=CONNECT_SECONDS, close_timeout=1,
                max_size=LARGEST,
            )  # fmt: skip
        except (ConnectionClosed, InvalidMessage) as problem:  # the server ended while it was answering
            raise ConnectionError(str(problem)) from None
        except InvalidHandshake as problem:
            raise EnvironmentFailed(f"{address} is no WebSocket of OpenEnv: {problem}") from None
        return self._socket, self._ask({"type": "reset", "data": reset}, opening=True)

    def _listed(self) -> list[ToolSpec]:
        """The tools that the server lists, as an MCP server does."""
        listed = self._ask({"type": "step", "data": {"type": "list_tools"}})
        return specs_of(listed["observation"].get("tools"), "input_schema", "inputSchema")

    def _ask(self, message: dict[str, Any], *, opening: bool = False) -> dict[str, Any]:
        """The answering observation. Raises ToolFailure, and _Full where a session that is `opening` ends."""
        from websockets.exceptions import ConnectionClosed

        try:
            self._socket.send(json.dumps(message))
            answer = json.loads(self._socket.recv(timeout=self._seconds))
            data = answer["data"]
        except ConnectionClosed as problem:
            if opening:
                raise _Full("it closes new sessions at once") from None
            raise EnvironmentFailed(f"{self._host} closed the session ({problem})") from None
        except TimeoutError:
            raise EnvironmentFailed(
                f"{self._host} did not answer within {self._seconds:g} s; a longer tool_seconds waits longer"
            ) from None
        except (ValueError, TypeError, KeyError):
            raise EnvironmentFailed(f"{self._host} speaks another protocol than OpenEnv 0.10") from None
        if answer.get("type") == "observation" and isinstance(data.get("observation"), dict):
            return data  # type: ignore[no-any-return]
        code, said = data.get("code"), one_line(str(data.get("errors") or data.get("message")), 1000)
        if code == "CAPACITY_REACHED":
            self._socket.close()
            raise _Full(said)
        if code == "VALIDATION_ERROR":
            raise ToolFailure(said)
        raise EnvironmentFailed(f"{self._host} failed: {code or answer.get('type')}: {said}")


def _act(action: Mapping[str, Any]) -> ToolSpec:
    """The tool whose arguments are an action's fields."""
    fields = {name: field for name, field in action.get("properties", {}).items() if name != "metadata"}
    required = [name for name in action.get("required", []) if name in fields]
    return ToolSpec(
        name="act",
        description=str(action.get("description") or "Take an action in the environment."),
        parameters={"type": "object", "properties": fields, "required": required},
    )


def _observation_text(seen: Mapping[str, Any]) -> str:
    """An observation as text: its only field, or its JSON."""
    given, beside = seen["observation"].items(), ("metadata", "done", "reward")
    fields = {key: value for key, value in given if key not in beside and value is not None}
    (only,) = fields.values() if len(fields) == 1 else (fields,)
    return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False)
