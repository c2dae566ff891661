"""What runs in a Ray actor: agents, their jails and graders, for a trainer in another process. Its runtime is
opened here, and so is that of a rank.

A job is one rollout, whose run id the trainer chose. So a job that is given to a second worker, after the
first one was lost, finds in the log what the first has done: it goes on with that run, or grades it, or takes
it as it is, and the log holds one run of the job that counts. This module does not import ray.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from nano_cluster.adapter_publisher import RemotePolicy
from nano_cluster.engine_pool import AdapterProbe, EnginePool, EngineState, PublishedAdapter
from nano_coder import __version__
from nano_coder.config import AgentConfig, redacting_store
from nano_coder.environment import Environments
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import bound_template, open_policy
from nano_coder.run.execution import RunSettings, Runtime, grade_run, log_unexecuted, resume_run, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.tool import TOOLS
from nano_rl.gather.rollouts import runtime_for
from nano_shared.errors import LogError, NanoError, UsageError
from nano_shared.hidden_checks import EnvironmentChecks
from nano_shared.policy import InterfaceProfile, Policy
from nano_shared.store import LogStore
from nano_shared.types import Sampling, StopReason, Task, Trajectory

OpenWorkerPolicy = Callable[[Callable[[str], None]], Policy]
"""takes what is told of servers"""
CLAIM_SECONDS = 15.0
"""that a run of a lost worker is waited for: a process that hangs ends some 7 s after Ray was told to"""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker or a rank opens once."""

    version: str
    """of nano"""
    machine: str
    """`machine()` of the trainer"""
    log: str
    """address with its password, as `LogStore.open` takes it"""
    blobs: str
    witness: str
    """a blob that the trainer has put into the log"""
    open_policy: OpenWorkerPolicy | None
    """None: the rank has the weights"""
    config: AgentConfig
    """the trainer's: of sandbox, interpreter, search and redaction"""
    profile: InterfaceProfile
    policy_name: str
    settings: RunSettings
    tool_files: tuple[str, ...]
    environments: tuple[str, ...]

    @property
    def log_is_local(self) -> bool:
        return "://" not in self.log or self.log.startswith("sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJob:
    """One rollout."""

    run: str
    """id of its run"""
    task: Task
    seed: int
    sampling: Sampling
    begun: bool = False
    """a worker that was lost may have begun the run"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Where a worker is."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBeat:
    """What a worker says of itself now and then."""

    memory_mb: float
    """resident"""
    retries: int
    """requests that were sent again to another server, so far"""
    told: tuple[str, ...]
    """what happened to servers since the beat before"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """A NanoError of a worker."""

    message: str
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Redo:
    """The run cannot be gone on with and was ended in the log: the job needs another id."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """What a worker needs of the trained model: all but its weights."""

    tokenizer: Any
    chat_template: str
    profile: InterfaceProfile
    id: str
    context_limit: int
    probe: AdapterProbe
    urls: tuple[str, ...]
    api_key: str | None = field(repr=False)
    patience: float
    """of the pool, seconds"""

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.probe.eos_ids

    def open(self, on_change: Callable[[str], None]) -> RemotePolicy:
        """A policy that renders here and samples on the servers."""
        pool = EnginePool(
            self.urls, self.probe, api_key=self.api_key, patience=self.patience, on_change=on_change
        )
        engine: Any = self  # the end of a turn and the context are all that is read of an engine
        template = bound_template(self.profile, self.tokenizer, self.chat_template)
        return RemotePolicy(LocalPolicy(engine, template, id=self.id, scheduler="free"), pool)


def open_named(config: AgentConfig, _on_change: Callable[[str], None]) -> Policy:
    """The hosted model that a configuration names."""
    return open_policy(config.model, config).policy


class RolloutExecutor:
    """The actor. `run` is called in several threads, the rest in others: a beat is always answered."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._policy: Any = None
        self._told: list[str] = []
        self._lock = threading.Lock()

    def open(self, setup: WorkerSetup) -> WorkerFacts | WorkerFailure:
        """Open everything, and check that the log is the trainer's."""
        try:
            self._open(setup)
        except NanoError as problem:
            return WorkerFailure(message=str(problem), exit_code=problem.exit_code)
        return WorkerFacts(host=socket.gethostname(), pid=os.getpid())

    def adopt(self, adapter: PublishedAdapter, states: Sequence[EngineState]) -> set[str]:
        """Sample from this adapter from now on; returns the older ones that are still in use."""
        return self._policy.pool.adopt(adapter, states)  # type: ignore[no-any-return]

    def beat(self) -> WorkerBeat:
        with self._lock:
            told, self._told = tuple(self._told), []
        pool = getattr(self._policy, "pool", None)
        return WorkerBeat(memory_mb=_resident_mb(), retries=pool.retries if pool else 0, told=told)

    def run(self, job: RolloutJob) -> str | Redo | WorkerFailure:
        """Run and grade a job; returns the id of its run, which is in the log with its verdict."""
        assert self._runtime is not None
        runtime = runtime_for(job.task, replace(self._runtime, sampling=job.sampling))
        try:
            run = gone_on_with(job, runtime) if job.begun else _run(job, runtime)
            if isinstance(run, Redo):
                return run
            if run.verdict is None:
                grade_run(run, runtime)
        except NanoError as problem:
            return WorkerFailure(message=str(problem), exit_code=problem.exit_code)
        return run.id

    def _open(self, setup: WorkerSetup) -> None:
        assert setup.open_policy is not None
        self._runtime = open_runtime(setup, partial(setup.open_policy, self._tell))
        self._policy = self._runtime.policy

    def _tell(self, what: str) -> None:
        with self._lock:
            self._told.append(what)


def open_runtime(setup: WorkerSetup, open_policy: Callable[[], Policy]) -> Runtime:
    """The trainer's runtime, opened in this process; raises UsageError if the log is not the trainer's."""
    if setup.version != __version__:
        raise UsageError(
            f"nano {__version__} is installed there, and the trainer is {setup.version}: install the same"
        )
    if setup.log_is_local and machine() != setup.machine:
        raise UsageError(
            f"the log {setup.log} is an SQLite file, which a worker on another machine cannot write: give"
            " --log postgresql://... (docs/running.md#the-log), or workers on the trainer's machine alone"
        )
    store = LogStore.open(setup.log, blobs=setup.blobs, create=False)
    try:
        store.get_blob(setup.witness)
    except (LogError, OSError):
        raise UsageError(
            f"the blobs at {setup.blobs} are not the trainer's there: give"
            " --log ...?blobs=s3://BUCKET/PREFIX, or a folder that all machines share"
            " (docs/running.md#the-log)"
        ) from None
    for tool in setup.tool_files:
        TOOLS.give(tool)
    config, policy = setup.config, open_policy()
    return Runtime(
        policy=policy, sandbox=open_sandbox(config.sandbox, python=config.python, image=config.image),
        store=redacting_store(store, getattr(policy, "decode", None), config), profile=setup.profile,
        policy_name=setup.policy_name, settings=setup.settings,
        environments=Environments.open(setup.environments),
    )  # fmt: skip


def gone_on_with(job: RolloutJob, runtime: Runtime) -> Trajectory | Redo:
    """What a lost worker may have begun, ended. Raises as `run_task` and `resume_run`."""
    until = time.monotonic() + CLAIM_SECONDS
    while True:
        logged = _logged(job, runtime)
        if logged and logged.stop not in (None, StopReason.INTERRUPTED):
            return logged
        if logged and isinstance(job.task.hidden, EnvironmentChecks):
            return _ended(job, "its environment's session went with its worker", runtime)
        try:
            return resume_run(job.run, runtime) if logged else _run(job, runtime)
        except LogError as problem:  # the lost worker is still at it, maybe before its first write
            if time.monotonic() > until:
                return _ended(job, str(problem), runtime)
            time.sleep(0.5)
        except UsageError as problem:
            if not logged:
                raise
            return _ended(job, str(problem), runtime)


def _run(job: RolloutJob, runtime: Runtime) -> Trajectory:
    return run_task(job.task, runtime, seed=job.seed, run_id=job.run)


def _logged(job: RolloutJob, runtime: Runtime) -> Trajectory | None:
    try:
        return runtime.store.get(job.run)
    except LogError:  # not in the log; if it is the log that fails, so will the run
        return None


def _ended(job: RolloutJob, why: str, runtime: Runtime) -> Trajectory | Redo:
    """End a run in the log against whoever still executes it; the run if that was faster."""
    stop, told = StopReason.INTERRUPTED, f"rolled out again: {why}"
    with suppress(LogError):  # the other worker began it just now
        log_unexecuted(job.task, runtime, job.run, stop, told, seed=job.seed)
    with suppress(LogError):  # it has ended
        runtime.store.finish(job.run, stop=stop, stop_detail=told, ended=time.time())
    run = runtime.store.get(job.run)
    return Redo(why=why) if run.stop is StopReason.INTERRUPTED else run


def machine() -> str:
    """The same in all processes of a machine until it boots again, containers included."""
    return _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
