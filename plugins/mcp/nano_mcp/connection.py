"""A connection to an MCP server: the SDK's client on an event loop of its own thread, called synchronously.

A server is untrusted: what it sends is bounded, and however it fails, an `McpFailure` says so. Commands run
in jails; URLs are asked from here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import math
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from nano_coder import __version__
from nano_coder.sandbox.protocol import Jail, Sandbox, allowed_hosts, connected, place_in_jail, showing
from nano_mcp.resident_program import ResidentProgram
from nano_mcp.settings import McpServer
from nano_shared.errors import ConfigError, SandboxError
from nano_shared.files import real_path
from nano_shared.printable import one_line
from nano_shared.types import Limits

if TYPE_CHECKING:
    import mcp_types
    from mcp.client import Client

T = TypeVar("T")
_LONGEST_MESSAGE = 8 << 20
"""bytes of one message of a server"""
_MOST_BYTES = 32 << 20
"""bytes that a server may send for one request"""
_MOST_PAGES = 20
_MOST_TOOLS = 512
_JAIL_PATH = "/usr/local/bin:/usr/bin:/bin"
_CLOSING_S = 5.0


class McpFailure(Exception):
    """A server failed; the message says how, in one line."""


class McpConnection:
    """An open connection. Calls are made one at a time; `close` may be called from any thread."""

    def __init__(
        self, name: str, server: McpServer, sandbox: Sandbox, limits: Limits, workspace: Jail | None = None
    ) -> None:
        """Starts the server on the files of `workspace`. Raises McpFailure, ConfigError, SandboxError."""
        require_sdk()
        self.name = name
        self._server = server
        self._program: ResidentProgram | None = None
        self._why: str | None = None
        """why the connection is of no use any more"""
        self._received = 0
        self._ready: concurrent.futures.Future[Client] = concurrent.futures.Future()
        self._loop = _event_loop()
        self._calling = threading.Lock()
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closing = asyncio.Event()
        if server.command is not None:
            self._program = self._start(sandbox, limits, workspace)
        self._task = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        try:
            self.client = self._within(self._ready, server.startup_timeout_sec)
        except McpFailure:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return self._why is None and not self._task.done()

    def tools(self) -> list[mcp_types.Tool]:
        """The tools that the server lists. Raises McpFailure."""

        async def listed() -> list[mcp_types.Tool]:
            found: list[mcp_types.Tool] = []
            cursor = None
            for _ in range(_MOST_PAGES):
                page = await self.client.list_tools(cursor=cursor)
                found += page.tools
                cursor = page.next_cursor
                if cursor is None or len(found) > _MOST_TOOLS:
                    break
            return found[:_MOST_TOOLS]

        return self._ask(listed(), self._server.startup_timeout_sec)

    def call(self, tool: str, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call a tool on the run's files as they are, and take over what it changed. Raises McpFailure."""
        with self._calling:
            try:
                if self._program is not None:
                    self._program.push_files()
                answer = self._ask(self.client.call_tool(tool, arguments), self._server.tool_timeout_sec)
                if self._program is not None:
                    self._program.pull_files()
            except SandboxError as problem:
                self._fail(str(problem))
                raise McpFailure(self._why) from None
        return answer

    def close(self) -> None:
        """End the server and the connection. Idempotent."""
        self._why = self._why or "it is closed"
        self._loop.call_soon_threadsafe(self._closing.set)
        if self._program is not None:
            self._program.close()
        concurrent.futures.wait([self._task], _CLOSING_S)
        self._task.cancel()

    # ------------------------------------------------------------------------------ the event loop

    def _ask(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        if self._why is not None:
            work.close()
            raise McpFailure(self._why)
        self._received = 0
        return self._within(asyncio.run_coroutine_threadsafe(_explained(work), self._loop), seconds)

    def _within(self, future: concurrent.futures.Future[T], seconds: float) -> T:
        """The result within so many seconds. Raises McpFailure; a server that hangs is ended."""
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError:
            future.cancel()
            self._fail(f"it did not answer within {seconds:g} s")
        except concurrent.futures.CancelledError:
            self._why = self._why or "it was closed"
        except McpFailure as problem:
            # an answer that is an error leaves the connection as it is
            raise McpFailure(self._why or str(problem)) from None
        raise McpFailure(self._why)

    def _fail(self, why: str) -> None:
        self._why = self._why or why
        self._loop.call_soon_threadsafe(self._closing.set)
        if self._program is not None:
            threading.Thread(target=self._program.close, daemon=True).start()

    async def _live(self) -> None:
        try:
            await _explained(self._serve_calls())
        except McpFailure as problem:
            self._why = self._why or str(problem)
        finally:
            self._why = self._why or "it ended"
            if not self._ready.done():
                self._ready.set_exception(McpFailure(self._why))

    async def _serve_calls(self) -> None:
        """Hold the connection open until it is closed: the SDK wants it opened and closed by one task."""
        from mcp.client import Client
        from mcp_types import Implementation

        transport = self._over_streams() if self._program is not None else self._over_http()
        info = Implementation(name="nano-coder", version=__version__)
        async with Client(transport, client_info=info, cache=None) as client:
            # the answer is text for a model; a schema of the server is not run against it
            client.session.validate_tool_result = _accept  # type: ignore[method-assign,assignment]
            self._ready.set_result(client)
            await self._closing.wait()

    # ------------------------------------------------------------------------------ transports

    def _start(self, sandbox: Sandbox, limits: Limits, workspace: Jail | None) -> ResidentProgram:
        server = self._server
        sandbox = connected(sandbox, allowed_hosts(server.net))
        folders = [real_path(folder) for folder in server.folders]
        if missing := [folder for folder in folders if not folder.is_dir()]:
            raise ConfigError(f"mcp.servers.{self.name}.folders: no such directory: {missing[0]}")
        sandbox = showing(sandbox, folders)

        def placed(text: str) -> str:
            for folder in folders:
                text = text.replace(str(folder), place_in_jail(folder))
            return text

        jail = sandbox.open(None, limits)
        try:
            return ResidentProgram(
                jail, [placed(text) for text in (str(server.command), *server.args)],
                environment=server.environment(f"{os.path.dirname(sandbox.python)}:{_JAIL_PATH}"),
                cwd=server.cwd and placed(server.cwd), workspace=workspace, on_output=self._take,
                on_end=self._ended,
            )  # fmt: skip
        except SandboxError as problem:
            raise McpFailure(str(problem)) from None

    def _ended(self, how: str) -> None:
        self._why = self._why or how
        self._loop.call_soon_threadsafe(self._incoming.put_nowait, None)
        self._loop.call_soon_threadsafe(self._closing.set)

    def _take(self, data: bytes) -> None:
        """Called with what a program writes, from the thread that reads it."""
        if self._counts(len(data)):
            self._loop.call_soon_threadsafe(self._incoming.put_nowait, data)

    def _counts(self, size: int) -> bool:
        """Whether the server may send so many bytes more for the current request; ends it if not."""
        self._received += size
        if self._received > _MOST_BYTES:
            self._fail(f"it sent more than {_MOST_BYTES >> 20} MB for one request")
        return self._received <= _MOST_BYTES

    @contextlib.asynccontextmanager
    async def _over_streams(self) -> AsyncIterator[Any]:
        """The transport over a program's standard streams: a JSON message a line."""
        import anyio

        to_client, incoming = anyio.create_memory_object_stream[Any](math.inf)
        outgoing, from_client = anyio.create_memory_object_stream[Any](0)
        async with anyio.create_task_group() as tasks, to_client, from_client:
            tasks.start_soon(self._read_lines, to_client)
            tasks.start_soon(self._write_lines, from_client)
            yield incoming, outgoing
            tasks.cancel_scope.cancel()

    async def _read_lines(self, to_client: Any) -> None:
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        begun = bytearray()
        while (data := await self._incoming.get()) is not None:
            *lines, last = data.split(b"\n")
            for line in lines:
                message, begun = bytes(begun + line), bytearray()
                # a line that is no message is what a library printed
                with contextlib.suppress(ValueError):
                    read = jsonrpc_message_adapter.validate_json(message, by_name=False)
                    await to_client.send(SessionMessage(read))
            begun += last
            if len(begun) > _LONGEST_MESSAGE:
                self._fail(f"it sent a message of more than {_LONGEST_MESSAGE >> 20} MB")
                break
        await to_client.aclose()

    async def _write_lines(self, from_client: Any) -> None:
        import anyio.to_thread

        assert self._program is not None
        async for sent in from_client:
            line = sent.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            try:
                # by a thread, since a program that reads nothing blocks it
                await anyio.to_thread.run_sync(self._program.send, line, abandon_on_cancel=True)
            except SandboxError as problem:
                self._fail(str(problem))
                return

    @contextlib.asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # unpacked bytes would not be counted
        headers = {"accept-encoding": "identity"}
        if variable := self._server.bearer_token_env_var:
            if variable not in os.environ:
                raise McpFailure(f"the variable {variable}, which holds its token, is not set")
            headers["authorization"] = f"Bearer {os.environ[variable]}"
        timeout = httpx2.Timeout(self._server.startup_timeout_sec, read=self._server.tool_timeout_sec)
        hooks: dict[str, list[Any]] = {"response": [self._bound]}
        async with httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks) as client:
            how: Any = {"http_client": client, "max_sse_event_size": _LONGEST_MESSAGE}
            async with streamable_http_client(str(self._server.url), **how) as streams:
                yield streams

    async def _bound(self, response: Any) -> None:
        """Count the bytes of a response as they come."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise McpFailure("it compressed its answer unasked")
        response.stream = _counted_kind()(response.stream, self._counts)


@cache
def _counted_kind() -> type:
    import httpx2

    class Counted(httpx2.AsyncByteStream):
        def __init__(self, stream: Any, counts: Callable[[int], bool]) -> None:
            self._stream, self._counts = stream, counts

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for chunk in self._stream:
                if not self._counts(len(chunk)):
                    raise McpFailure("it sent too much")
                yield chunk

        async def aclose(self) -> None:
            await self._stream.aclose()

    return Counted


async def _accept(_name: str, _result: Any) -> None:
    return None


def require_sdk() -> None:
    """Raises ConfigError where the MCP SDK is not installed."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("MCP servers need the package mcp; pip install 'nano-rl-coder[mcp]'")


async def _explained(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except Exception as problem:  # the SDK raises many kinds, by what a server sends
        raise McpFailure(_one_line(problem)) from None


def _one_line(problem: BaseException) -> str:
    """One line about what went wrong, of the first error of a group."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if isinstance(problem, ValidationError):
        return f"its answer does not fit the protocol ({problem.error_count()} errors)"
    said = str(problem) or type(problem).__name__
    return one_line(said, 300)


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all connections of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop
