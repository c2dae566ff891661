"""nano's agent for `harbor run --agent-import-path nano_formats.harbor.agent:NanoAgent`.

Harbor imports this module, in an environment of its own that has nano too; nothing of nano does. The agent
runs in Harbor's process and acts in the trial's environment through Harbor; every run is in a log of nano,
and its tokens are in `context.rollout_details`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, Unpack

from harbor.agents.base import BaseAgent
from harbor.agents.capabilities import AgentCapabilities
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext

from nano_coder import __version__
from nano_coder.config import load_config, redacting_store, task_limits
from nano_coder.models.opening import open_policy
from nano_coder.run.execution import RunHooks, Runtime, run_task
from nano_coder.sandbox.jail_request import Output, check_run, python_program
from nano_coder.sandbox.launcher import files
from nano_coder.sandbox.protocol import ExecResult, ResourceUse, RunOptions
from nano_formats import atif
from nano_formats.token_triple import rollout_details, triples
from nano_shared import snapshot
from nano_shared.errors import SandboxError
from nano_shared.files import content_hash, scratch_folder
from nano_shared.logged_run import LoggedRun
from nano_shared.store import LogStore
from nano_shared.types import Limits, Sampling, Task, Trajectory, Turn

T = TypeVar("T")
_BESIDE_S = 30
"""seconds that Harbor may take for a command beside its own time"""


class NanoAgent(BaseAgent):  # type: ignore[misc]
    """Options are settings of nano: `--ak base_url=http://127.0.0.1:8000/v1 --ak max_turns=30`.

    `-m` is a model by nano's names. The log is NANO_LOG, or log.db beside Harbor's logs of the trial.
    """

    capabilities = AgentCapabilities(atif=True)

    def __init__(self, logs_dir: Path, model_name: str | None = None, *args: Any, **settings: Any) -> None:
        ours = {"logger", "mcp_servers", "skills_dir", "extra_env", "load_trajectory", "environment_logs_dir",
                "override_setup_timeout_sec"}  # fmt: skip
        theirs = {name: settings.pop(name) for name in ours & set(settings)}
        super().__init__(logs_dir, model_name, *args, **theirs)
        self._settings = settings

    @staticmethod
    def name() -> str:
        return "nano-coder"

    def version(self) -> str:
        return __version__

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed in the environment: the agent acts from outside."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Raises NanoError for a setting, a model or an environment that does not serve."""
        place = HarborPlace(environment, asyncio.get_running_loop())
        try:
            await asyncio.to_thread(self._work, instruction, place, context)
        finally:
            place.over = True  # a thread cannot be cancelled: its next command fails

    def _work(self, instruction: str, place: HarborPlace, context: AgentContext) -> None:
        given = {"model": self.model_name, "log": os.environ.get("NANO_LOG") or str(self.logs_dir / "log.db")}
        config, _ = load_config({**given, **self._settings}, self.logs_dir)
        opened = open_policy(config.model, config, own_temperature=config.temperature is None)
        with LogStore.open(config.log) as store:
            with place.downloaded() as folder:
                start = snapshot.snapshot_directory(folder, store.blobs, max_bytes=config.workspace_mb << 20)
            key, limits = content_hash([instruction, start]), task_limits(config)
            task = Task(key=key, prompt=instruction, snapshot=start, limits=limits)
            runtime = Runtime(
                policy=opened.policy, sandbox=HarborSandbox(place), profile=opened.profile,
                store=redacting_store(store, getattr(opened.policy, "decode", None), config),
                sampling=Sampling(temperature=config.temperature or 0.0), policy_name=opened.name,
            )  # fmt: skip
            turns: list[Turn] = []
            begun: list[Trajectory] = []

            def turn_taken(turn: Turn) -> None:
                turns.append(turn)
                fill(context, begun[0].model_copy(update={"turns": tuple(turns)}))

            hooks = RunHooks(start=begun.append, turn=turn_taken)
            run = run_task(task, replace(runtime, hooks=hooks))
            fill(context, run)
            text = json.dumps(atif.write(LoggedRun(trajectory=run)), ensure_ascii=False)
            (self.logs_dir / "trajectory.json").write_text(text, encoding="utf-8")


def fill(context: AgentContext, run: Trajectory) -> None:
    """Prompt ids, sampled ids and log-probs of each turn, as far as the run is; counts; the run's id."""
    found = [triple for triple in triples(run) if triple is not None]
    context.metadata = {"run": run.id, "stop": run.stop and str(run.stop), "detail": run.stop_detail}
    if not found:
        return
    context.n_input_tokens = sum(len(triple.prompt_ids) for triple in found)
    context.n_output_tokens = sum(len(triple.sampled_ids) for triple in found)
    context.rollout_details = rollout_details(found)


# ------------------------------------------------------------------- the trial's environment as a sandbox


@dataclass(slots=True)
class HarborPlace:
    """A trial's environment, called from the agent's thread."""

    environment: BaseEnvironment
    loop: asyncio.AbstractEventLoop
    over: bool = False
    """whether Harbor has ended the agent"""
    _folder: str = field(default="", init=False)

    def call(self, method: Callable[..., Awaitable[T]], *args: Any, **more: Any) -> T:
        """Raises SandboxError if Harbor fails, or has ended the agent."""
        if self.over:
            raise SandboxError("Harbor has ended the trial's agent")
        try:
            return asyncio.run_coroutine_threadsafe(_awaited(method(*args, **more)), self.loop).result()
        except (RuntimeError, OSError, TimeoutError) as problem:
            raise SandboxError(f"Harbor's environment failed: {problem}") from problem

    def execute(self, command: str, seconds: float = 120.0, **more: Any) -> tuple[int, bytes, bytes]:
        """Exit code, output and error output of a shell line."""
        done = self.call(self.environment.exec, command, timeout_sec=int(seconds) + _BESIDE_S, **more)
        return done.return_code, (done.stdout or "").encode(), (done.stderr or "").encode()

    @property
    def workdir(self) -> str:
        """Where the environment works."""
        if not self._folder:
            self._folder = self.execute("pwd")[1].decode().strip()
        return self._folder

    @contextmanager
    def downloaded(self) -> Iterator[Path]:
        """A copy of its working directory on this machine."""
        with scratch_folder("harbor") as folder:
            work = folder / "work"
            work.mkdir()
            self.call(self.environment.download_dir, self.workdir, work)
            yield work


async def _awaited(value: Awaitable[T]) -> T:
    return await value


class HarborSandbox:
    """One jail, which is the trial's environment as it stands: it holds the starting workspace already."""

    name = "harbor"
    python = "python3"
    layers: Mapping[str, bool] = {}
    """what isolates is Harbor's to say"""

    def __init__(self, place: HarborPlace) -> None:
        self._place = place

    def open(self, workspace: Path | None, limits: Limits) -> HarborJail:
        return HarborJail(self._place, limits)


class HarborJail:
    """Memory and processes are bounded by Harbor alone, time by `timeout` of the image. Output is text."""

    def __init__(self, place: HarborPlace, limits: Limits) -> None:
        self._place, self._limits = place, limits

    def run(self, argv: Sequence[str], **options: Unpack[RunOptions]) -> ExecResult:
        wall, env = options.get("timeout", self._limits.tool_seconds), dict(options.get("env", {}))
        cap = options.get("output_bytes", self._limits.output_bytes)
        check_run(argv, env, wall, cap)
        line = f"cd {shlex.quote(self._place.workdir)} && timeout -s KILL {wall:g} {shlex.join(argv)}"
        given = options.get("stdin", b"")
        data = given if isinstance(given, bytes) else os.read(given, 1 << 26)
        started = time.monotonic()
        if data:
            held = f"/tmp/.nano-{secrets.token_hex(8)}"
            self._put(held, data)
            line = f"{{ {line}; }} < {held}; code=$?; rm -f {held}; exit $code"
        else:
            line = f"{{ {line}; }} < /dev/null"
        code, out, err = self._place.execute(line, wall, env=env)
        took = time.monotonic() - started
        late = code in (124, 137) and took >= wall
        kept = [Output(cap), Output(cap)]
        for output, text in zip(kept, (out, err), strict=True):
            output.feed(text)
        return ExecResult(
            exit_code=None if late else code, signal=9 if late else None, timed_out=late, oom=False,
            stdout=kept[0].value(), stderr=kept[1].value(), stdout_bytes=len(out), stderr_bytes=len(err),
            used=ResourceUse(wall_s=took),
        )  # fmt: skip

    def run_python(
        self, source: str, argv: Sequence[str] = (), *, isolated: bool = False, **options: Unpack[RunOptions]
    ) -> ExecResult:
        return self.run(python_program("python3", source, argv, isolated=isolated), **options)

    def read(self, path: str) -> bytes:
        target = self._path(path)
        quoted = shlex.quote(target)
        for failure, test in ((FileNotFoundError, "-e"), (PermissionError, "-r")):
            if self._place.execute(f"test {test} {quoted}")[0]:
                raise failure(path)
        if self._place.execute(f"test -d {quoted}")[0] == 0:
            raise IsADirectoryError(path)
        with scratch_folder("harbor") as folder:
            self._place.call(self._place.environment.download_file, target, folder / "file")
            return (folder / "file").read_bytes()

    def write(self, path: str, data: bytes) -> None:
        target = self._path(path)
        if self._place.execute(f"mkdir -p {shlex.quote(os.path.dirname(target))}")[0]:
            raise NotADirectoryError(path)
        self._put(target, data)

    def snapshot(self) -> bytes:
        out = BytesIO()
        with self._place.downloaded() as folder:
            files.pack(str(folder), out)
        return out.getvalue()

    def restore(self, snapshot: bytes) -> None:
        place = self._place
        place.execute(f"find {shlex.quote(place.workdir)} -mindepth 1 -delete")
        with scratch_folder("harbor") as folder:
            root = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            try:
                files.unpack(root, BytesIO(snapshot))
            finally:
                os.close(root)
            place.call(place.environment.upload_dir, folder, place.workdir)

    def close(self) -> None:
        """The environment is Harbor's to close."""

    def _path(self, path: str) -> str:
        return os.path.join(self._place.workdir, path.removeprefix("/work/"))

    def _put(self, target: str, data: bytes) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            self._place.call(self._place.environment.upload_file, file.name, target)
