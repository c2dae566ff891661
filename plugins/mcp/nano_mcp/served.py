"""nano as an MCP server over standard streams: tools that run, show and apply work in one directory.

Each call is one command of ours in a process of its own, so a client gets what the command line gives, and a
failing run ends no server. No tool takes a directory: a client works where the server was started.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nano_coder import __version__
from nano_mcp.connection import require_sdk
from nano_shared.errors import Interrupted
from nano_shared.process import own_python

_COMMAND = own_python("-c", "from nano_coder.cli import main; main()")
_MOST_SHOWN = 400_000
"""characters of an answer"""


def serve(directory: Path) -> None:
    """Serve until standard input is closed, or a signal ends the process. Raises ConfigError without the
    SDK."""
    require_sdk()
    from mcp.server import MCPServer

    server = MCPServer(
        "nano-coder",
        version=__version__,
        instructions=f"A coding agent for {directory.resolve()}. It works in a sandboxed copy; apply brings"
        " a run's changes into the directory.",
    )
    for tool in _tools(directory.resolve()):
        server.add_tool(tool)
    try:
        server.run("stdio")
    except KeyboardInterrupt:
        # the SDK reads standard input in a thread, which the end of the process would wait for
        os._exit(Interrupted.exit_code)


def _tools(directory: Path) -> list[Callable[..., Any]]:
    async def run(task: str, check: str = "", max_turns: int = 0) -> str:
        """Let the agent work on a task in a sandboxed copy of the directory. Answers with JSON: the run's id,
        why it stopped, the verdict of the check (a shell line), and the diff. Nothing is applied."""
        options = [
            *(["--check", check] if check else []),
            *(["--limit", f"max_turns={max_turns}"] if max_turns else []),
        ]
        return await _called(["run", "-C", str(directory), "--json", *options, "--", task])

    async def diff(run: str = "last") -> str:
        """Show what a run changed, as a unified diff."""
        return await _called(["diff", "-C", str(directory), "--", run])

    async def apply(run: str) -> str:
        """Apply what a run changed to the directory. Stops, touching nothing, where files changed since."""
        return await _called(["apply", "-C", str(directory), "--", run])

    async def log(number: int = 20) -> str:
        """List the newest runs as JSON."""
        return await _called(["log", "list", "--json", "-n", str(number)])

    async def exec(command: str, seconds: float = 60) -> str:
        """Run a line of shell in a sandboxed copy of the directory; its changes are dropped. Answers with
        JSON: output, exit code, and whether it ran out of time."""
        options = ["--workspace", str(directory), "--timeout", str(seconds), "--json"]
        return await _called(["exec", *options, "-c", command], failing=True)

    return [run, diff, apply, log, exec]


async def _called(arguments: Sequence[str], *, failing: bool = False) -> str:
    """What a command of ours prints. Raises ToolError, which the client is shown, with its error where it
    fails; a command that is `failing` reports that in its output."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except (OSError, ValueError) as problem:  # a NUL byte, half a surrogate, more than a command line holds
        raise ToolError(f"the arguments cannot be passed on: {problem}") from None
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
    said = out.decode("utf-8", "replace")[:_MOST_SHOWN]
    # a run that did not succeed has a result too
    if process.returncode and not (said.strip() and (failing or arguments[0] == "run")):
        raise ToolError(err.decode("utf-8", "replace").strip() or f"exit code {process.returncode}")
    return said or err.decode("utf-8", "replace")[:_MOST_SHOWN] or "done"
