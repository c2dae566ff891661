"""Agents of others as rollouts: a command in the jail whose only way out is the policy's own server."""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from nano_coder.agent.actions import Workspace
from nano_coder.sandbox.protocol import (
    ExecResult,
    InterruptibleJail,
    Sandbox,
    SupportsListening,
    place_in_jail,
    showing,
)
from nano_coder.sandbox.proxy import PORT
from nano_shared import snapshot
from nano_shared.errors import SandboxError, UsageError
from nano_shared.files import in_memory, real_path, scratch_folder
from nano_shared.printable import printable
from nano_shared.types import StopReason, Task, Trajectory

if TYPE_CHECKING:
    from nano_apis.episode import AgentEpisode
    from nano_coder.run.execution import Runtime

_GRACE_S = 10.0
"""seconds after the run's limit in which the agent may save its work; its requests are refused"""
_LOOK_S = 0.05
"""seconds between two looks at a run whose time is nearly up"""
_WITHOUT_LIMIT_S = 7 * 86400.0
"""its time is held by `_ended_after`, which knows how long it waited for others"""
URL = f"http://127.0.0.1:{PORT}"
_KEY = "nano"


def open_command(command: str, folders: Sequence[str] = ()) -> ForeignAgent:
    """The agent of that command. Raises UsageError for a missing folder."""
    return ForeignAgent(command=command, mounts=tuple(real_path(folder) for folder in folders))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignAgent:
    """A program that works in the jail, and asks the policy by OpenAI's and Anthropic's APIs."""

    command: str
    """shell line, run in the workspace; `{prompt}` stands for the task's prompt, quoted"""
    mounts: tuple[Path, ...] = ()
    """folders of the host that the jail sees read-only, where the agent is installed: at the same place, or
    below /opt/agents where the jail has a /tmp or /work of its own"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """further environment variables, beside those of the server's address and key"""

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise UsageError("--agent is empty; give the command that starts the agent")
        if missing := [folder for folder in self.mounts if not folder.is_dir()]:
            raise UsageError(f"--agent-folders {missing[0]}: no such directory")

    def line(self, task: Task) -> str:
        """The shell line, with the places that the folders have in the jail."""
        command = self.command
        for folder in self.mounts:
            command = command.replace(str(folder), place_in_jail(folder))
        return command.replace("{prompt}", shlex.quote(task.prompt))

    def variables(self) -> dict[str, str]:
        """The environment variables by which clients find their server."""
        ours = {
            "OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": _KEY,
            "ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": _KEY, "HOME": "/tmp",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }  # fmt: skip
        return {**ours, **self.environment}

    def run(self, begun: Trajectory, runtime: Runtime) -> Trajectory | tuple[StopReason, str]:
        return run_foreign_agent(self, begun, runtime)


def run_foreign_agent(
    agent: ForeignAgent, begun: Trajectory, runtime: Runtime
) -> Trajectory | tuple[StopReason, str]:
    """Let the agent work on the task of `begun`, from its workspace. Its requests are the turns. The longest
    of its conversations is the run; others are logged without a verdict. Of an agent that sent no request
    nothing is logged: returns why, a stop reason that counts as our failure."""
    from nano_apis.app import episode_app
    from nano_apis.episode import AgentEpisode
    from nano_apis.served_models import ServedModel

    task, policy, start = begun.task, runtime.policy, str(begun.snapshot)
    model = ServedModel(policy=policy, profile=runtime.profile, store=runtime.store, name=begun.policy)
    episode = AgentEpisode(model, begun, runtime.sampling, getattr(policy, "slot", None))
    with scratch_folder("start", in_memory()) as folder:
        snapshot.materialise(start, runtime.store.blobs, folder / "work")
        jail, listener = _sandbox(runtime.sandbox, agent).open_listening(folder / "work", task.limits)
    try:
        with _answering(listener, episode_app(episode)), _ended_after(episode, jail):
            command = ["/bin/sh", "-c", agent.line(task)]
            ended = jail.run(command, env=agent.variables(), timeout=_WITHOUT_LIMIT_S)
        full = StopReason.CONTEXT_FULL if episode.overflowed else None
        stop, detail = _why(ended, episode.reached or full)
        workspace = Workspace(jail, runtime.store.blobs, start=start, snapshot=start)
        try:
            workspace.refresh()
        except snapshot.SnapshotError as problem:  # too large: what it began with is graded
            detail = str(problem)
            stop = StopReason.GAVE_UP if stop is StopReason.FINISHED else stop
        run = episode.end(workspace.snapshot, workspace.diff(), stop, detail)
    except SandboxError as problem:
        run = episode.end(start, "", StopReason.SANDBOX_ERROR, str(problem))
        return run or (StopReason.SANDBOX_ERROR, str(problem))
    finally:
        jail.close()
    if run is not None:
        return run
    said = printable((ended.stderr or ended.stdout).decode(errors="replace").strip()[-400:])
    detail = f"the agent had no answer of the model (exit code {ended.exit_code}): {said}"
    stop = StopReason.POLICY_ERROR if stop is StopReason.POLICY_ERROR else StopReason.SANDBOX_ERROR
    return stop, detail


def _sandbox(sandbox: Sandbox, agent: ForeignAgent) -> SupportsListening:
    sandbox = showing(sandbox, agent.mounts)
    if not isinstance(sandbox, SupportsListening):
        raise UsageError(f"the sandbox {sandbox.name!r} has no way from an agent to its model; use ns")
    return sandbox


def _why(ended: ExecResult, reached: StopReason | None) -> tuple[StopReason, str | None]:
    if reached is not None:
        return reached, None
    if ended.exit_code == 0:
        return StopReason.FINISHED, None
    code = f"exit code {ended.exit_code}" if ended.signal is None else f"signal {ended.signal}"
    return StopReason.FINISHED, f"the agent ended with {code}"


@contextmanager
def _ended_after(episode: AgentEpisode, jail: InterruptibleJail) -> Iterator[None]:
    """Interrupt the jail's program when its time is up, or some seconds after it reached another limit. A
    client may retry a refused request for minutes; its run is over at the first refusal."""
    ended, longest = threading.Event(), episode.run.task.limits.max_seconds
    episode.began = time.monotonic()

    def watch() -> None:
        while (left := longest - episode.seconds) > 0:
            if episode.limited.wait(max(left, _LOOK_S)):
                break
        else:
            if not ended.is_set():
                episode.reach(StopReason.MAX_SECONDS)
                jail.interrupt()
            return
        if not ended.wait(_GRACE_S):
            jail.interrupt()

    watcher = threading.Thread(target=watch, name="limit of an agent", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        episode.limited.set()
        watcher.join()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, for the servers of all episodes."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="episodes", daemon=True).start()
    return loop


@contextmanager
def _answering(listener: socket, app: Any) -> Iterator[None]:
    """Serve the application on a socket, in another thread."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    served = asyncio.run_coroutine_threadsafe(server.serve(sockets=[listener]), _loop())
    try:
        while not server.started and not served.done():
            time.sleep(0.005)
        yield
    finally:
        server.should_exit = server.force_exit = True
        served.result(timeout=30)
