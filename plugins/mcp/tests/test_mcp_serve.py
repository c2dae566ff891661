"""nano as an MCP server: a real client drives the real command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from executions import a_runtime, a_task, act

pytest.importorskip("mcp")
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

from nano_coder.run.execution import Project, run_task
from nano_shared import snapshot

Call = Callable[..., Awaitable[Any]]


def drive(directory: Path, home: Path, script: Callable[[Call], Awaitable[None]], mode: str = "auto") -> None:
    """Run the server in `directory`, and the script with a function that calls its tools."""
    code = "from nano_coder.cli import main; main()"
    server = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-c", code, "mcp", "serve", "-C", str(directory)],
        env={**os.environ, "NANO_HOME": str(home)},
    )

    async def session() -> None:
        async with Client(server, mode=mode) as client:

            async def call(tool: str, **arguments: Any) -> Any:
                answer = await client.call_tool(tool, arguments)
                return answer.is_error, "".join(block.text for block in answer.content)

            assert {tool.name for tool in (await client.list_tools()).tools} == {
                "run", "diff", "apply", "log", "exec",
            }  # fmt: skip
            await script(call)

    asyncio.run(session())


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_commands_are_run_on_a_copy_of_the_directory(tmp_path: Path, mode: str) -> None:
    (tmp_path / "a.txt").write_text("here\n")

    async def script(call: Call) -> None:
        failed, said = await call("exec", command="cat a.txt; rm a.txt; exit 3")
        told = json.loads(said)
        assert (failed, told["stdout"], told["exit_code"]) == (False, "here\n", 3)
        failed, said = await call("log")
        assert failed
        assert "there is no log" in said
        failed, said = await call("run", task=" ")
        assert failed
        assert "the task is empty" in said
        for command in ("echo \0", "echo " + "x" * 200_000):
            failed, said = await call("exec", command=command)
            assert failed
            assert "the arguments cannot be passed on" in said

    drive(tmp_path, tmp_path / "home", script, mode)
    assert (tmp_path / "a.txt").read_text() == "here\n"


@pytest.mark.slow
def test_modules_of_the_directory_are_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nano_coder", "json", "pydantic", "typer", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)

    async def script(call: Call) -> None:
        assert "there is no log" in (await call("log"))[1]

    drive(tmp_path, tmp_path / "home", script)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_run_is_shown_and_applied(tmp_path: Path) -> None:
    project, home = tmp_path / "project", tmp_path / "home"
    for folder in (project, home):
        folder.mkdir()
    (project / "a.py").write_text("one\n")
    script_of_run = [act("write_file", path="a.py", content="two\n"), act("submit")]
    runtime = a_runtime(home, script_of_run, project=Project(directory=str(project.resolve())))
    start = snapshot.snapshot_directory(project, runtime.store.blobs)
    task = a_task(files={}, snapshot=start)
    run = run_task(task, runtime)

    async def script(call: Call) -> None:
        assert run.id in (await call("log"))[1]
        assert "+two" in (await call("diff"))[1]
        assert (await call("apply", run=run.id))[0] is False
        failed, said = await call("diff", run="no-such")
        assert failed
        assert "no run 'no-such'" in said

    drive(project, home, script)
    assert (project / "a.py").read_text() == "two\n"


def test_a_signal_ends_the_server_while_it_waits_for_the_client(tmp_path: Path) -> None:
    asked = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    line = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": asked})
    code = "from nano_coder.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, "mcp", "serve", "-C", str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env=os.environ | {"NANO_HOME": str(tmp_path)},
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(line + "\n")
        assert "nano-coder" in server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        try:
            assert server.wait(30) == 130
        finally:
            server.kill()
