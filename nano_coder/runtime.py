"""The one door to the runtime: run a task, resume a run, grade it.

`run_task` is the only place that turns exceptions into stop reasons: a bad rollout is data, not a crash.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from nano_coder import __version__
from nano_coder.agent import Agent, observation_messages, spill_path
from nano_coder.chat_template import CHATML, ChatTemplate
from nano_coder.dialects import DIALECTS
from nano_coder.grading import grade_folder, grade_trajectory
from nano_coder.grading.graders import GRADERS, by_grader, find_grader
from nano_coder.grading.measure import measured
from nano_coder.grading.names import used_names
from nano_coder.logprob_check import Scored, gap_of, rescored
from nano_coder.models import OpenedWeights, default_model, local_policy, open_policy, open_weights
from nano_coder.policies.scripted import ScriptedPolicy
from nano_coder.profiles import COMPACT_1, PROFILES, find_profile, serving_profile
from nano_coder.prompt import first_messages, offered_tools
from nano_coder.refusal import Refusal
from nano_coder.sandbox import Jail, Sandbox, open_sandbox
from nano_coder.sandbox.lazy import LazyJail
from nano_coder.token_check import TokenCheck
from nano_coder.tools import ToolContext
from nano_coder.verify import blocking, verify
from nano_coder.verify import hashes as profile_hashes
from nano_coder.weights import BASE, quiet_transformers
from nano_coder.workspace import Workspace
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.conversation import Conversation
from nano_shared.errors import ContextFull, PolicyError, SandboxError, UsageError
from nano_shared.policy import Policy
from nano_shared.profile import InterfaceProfile
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import Sampling, StopReason, Task, Trajectory, Turn

runtime_version = __version__

__all__ = [
    "BASE",
    "CHATML",
    "COMPACT_1",
    "DIALECTS",
    "GRADERS",
    "PROFILES",
    "ChatTemplate",
    "OpenedWeights",
    "Refusal",
    "Runtime",
    "Sandbox",
    "Scored",
    "ScriptedPolicy",
    "TokenCheck",
    "blocking",
    "default_model",
    "find_grader",
    "find_profile",
    "first_messages",
    "by_grader",
    "gap_of",
    "grade_folder",
    "grade_run",
    "grade_trajectory",
    "local_policy",
    "measured",
    "observation_messages",
    "offered_tools",
    "open_policy",
    "open_sandbox",
    "open_weights",
    "profile_hashes",
    "quiet_transformers",
    "regrade_run",
    "rescored",
    "refuse_ended",
    "resume_run",
    "run_task",
    "runtime_version",
    "serving_profile",
    "untouched",
    "used_names",
    "verify",
]

OnTurn = Callable[[Turn], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What every execution needs, whoever asks for it: evaluation, collection and training alike."""

    policy: Policy
    sandbox: Sandbox
    store: LogStore
    profile: InterfaceProfile = COMPACT_1
    """of the policy; a task that names tools beyond it runs under the profile that adds them"""
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen, so one is enough)
    policy_name: str = ""
    """the policy as the user named it"""


def run_task(
    task: Task,
    runtime: Runtime,
    *,
    seed: int | None = None,
    parent: str | None = None,
    on_turn: OnTurn | None = None,
    on_start: Callable[[Trajectory], None] | None = None,
) -> Trajectory:
    """Execute a task from its starting workspace until there is a reason to stop, logging each turn.

    Policy and sandbox failures, full contexts and interrupts end the run with a stop reason. Raises
    UsageError for a task that the profile cannot serve and LogError where the log cannot be written.
    """
    runtime = _serving(runtime, task)
    offered_tools(runtime.profile, task)  # a task that cannot be served is refused before it is logged
    start = _starting_snapshot(task, runtime.store.blobs)
    trajectory = _new_trajectory(task, runtime, start, seed, parent)
    with runtime.store.claim(trajectory.id), _jail(start, task, runtime) as jail:
        runtime.store.begin(trajectory)
        if on_start:
            on_start(trajectory)
        workspace = Workspace(jail, runtime.store.blobs, start=start, snapshot=start)
        return _drive(_agent(trajectory, runtime, jail, workspace), trajectory, runtime, on_turn)


def untouched(task: Task, runtime: Runtime) -> Trajectory:
    """What a run is in which nothing is done: for checks of tasks, and not logged."""
    start = _starting_snapshot(task, runtime.store.blobs)
    run = _new_trajectory(task, runtime, start, None, None)
    return run.model_copy(update={"stop": StopReason.GAVE_UP})


def resume_run(run_id: str, runtime: Runtime, *, on_turn: OnTurn | None = None) -> Trajectory:
    """Go on with a run that was killed or interrupted, from its last finished turn.

    Raises LogError for an unknown run or one that another process executes, UsageError for one that ended.
    """
    trajectory = runtime.store.get(run_id)
    runtime = _serving(runtime, trajectory.task)
    with runtime.store.claim(trajectory.id):
        trajectory = runtime.store.get(trajectory.id)
        start, newest = _check_resumable(trajectory, runtime)
        runtime.store.reopen(trajectory.id)
        trajectory = trajectory.model_copy(update={"stop": None, "stop_detail": None, "ended": None})
        with _jail(newest, trajectory.task, runtime) as jail:
            workspace = Workspace(jail, runtime.store.blobs, start=start, snapshot=newest)
            agent = _agent(trajectory, runtime, jail, workspace)
            for turn in trajectory.turns:
                agent.conversation.record(turn.completion)
                agent.take(turn)
                _restore_spills(turn, jail, runtime)
            return _drive(agent, trajectory, runtime, on_turn)


def grade_run(trajectory: Trajectory, runtime: Runtime) -> Trajectory:
    """Grade a finished run in a fresh jail and log the verdict. Without any check there is no verdict."""
    verdict = grade_trajectory(trajectory, runtime.sandbox, runtime.store.blobs)
    if verdict is None:
        return trajectory
    runtime.store.add_verdict(trajectory.id, verdict)
    return trajectory.model_copy(update={"verdict": verdict})


def _serving(runtime: Runtime, task: Task) -> Runtime:
    return replace(runtime, profile=serving_profile(runtime.profile, task))


def regrade_run(run: str, store: LogStore, sandbox: Sandbox, grader: str | None = None) -> Trajectory:
    """Grade a logged run from what is stored of it, and add the verdict beside the ones that it has.

    Nothing of the run is executed again. Raises LogError for an unknown run, UsageError for an unknown
    grader, for a run that has not ended and for one whose task has no check.
    """
    name = find_grader(grader)
    trajectory = store.get(run)
    if trajectory.stop is None:
        raise UsageError(
            f"run {trajectory.id} has not ended; nano-coder resume {trajectory.id} goes on with it"
        )
    verdict = grade_trajectory(trajectory, sandbox, store.blobs)
    if verdict is None:
        raise UsageError(f"run {trajectory.id} has no check to be graded by (task {trajectory.task.key!r})")
    verdict = by_grader(name, verdict)
    store.add_verdict(trajectory.id, verdict)
    return trajectory.model_copy(update={"verdict": verdict})


def _new_trajectory(
    task: Task, runtime: Runtime, start: str, seed: int | None, parent: str | None
) -> Trajectory:
    return Trajectory(
        id=new_run_id(),
        task=task,
        parent=parent,
        runtime_version=__version__,
        profile=runtime.profile.name,
        profile_hash=runtime.profile.hash,
        template_hash=runtime.policy.template_hash,
        tools_hash=runtime.profile.tools_hash,
        policy=runtime.policy_name or runtime.policy.id,
        snapshot=start,
        started=time.time(),
        seed=seed,
    )


def refuse_ended(trajectory: Trajectory) -> None:
    """Raises UsageError for a run that ended by itself."""
    if trajectory.stop not in (None, StopReason.INTERRUPTED):
        raise UsageError(
            f"run {trajectory.id} ended ({trajectory.stop}); only a killed or interrupted run resumes"
        )


def _check_resumable(trajectory: Trajectory, runtime: Runtime) -> tuple[str, str]:
    """The workspace before the first action and after the last logged turn, of a run that may go on."""
    run, profile = trajectory.id, runtime.profile
    refuse_ended(trajectory)
    newest = trajectory.last_snapshot
    if trajectory.snapshot is None or newest is None:
        raise UsageError(f"run {run} never got a workspace; run the task again")
    if (trajectory.profile_hash, trajectory.template_hash) != (
        profile.hash,
        runtime.policy.template_hash,
    ):
        raise UsageError(
            f"run {run} was made under profile {trajectory.profile} with another template than "
            f"this policy's; resume it with --model {trajectory.policy}"
        )
    return trajectory.snapshot, newest


def _starting_snapshot(task: Task, blobs: BlobStore) -> str:
    """The task's starting workspace in the blob store."""
    if task.snapshot is not None:
        return task.snapshot
    with tempfile.TemporaryDirectory(prefix="nano-start-") as folder:
        _lay_down(task, Path(folder))
        return snapshot.snapshot_directory(Path(folder), blobs)


@contextmanager
def _jail(snapshot_id: str, task: Task, runtime: Runtime) -> Iterator[Jail]:
    """A jail on a snapshot, opened when the first tool needs it."""

    def opener() -> Jail:
        with tempfile.TemporaryDirectory(prefix="nano-start-") as folder:
            start = Path(folder) / "work"
            snapshot.materialise(snapshot_id, runtime.store.blobs, start)
            return runtime.sandbox.open(start, task.limits)

    jail = LazyJail(opener)
    try:
        yield jail
    finally:
        jail.close()


def _lay_down(task: Task, start: Path) -> None:
    """Raises UsageError for files that cannot lie in one folder, or that are no text."""
    for name, text in task.files.items():
        try:
            (start / name).parent.mkdir(parents=True, exist_ok=True)
            (start / name).write_text(text, encoding="utf-8", newline="")
        except (OSError, UnicodeEncodeError) as problem:
            raise UsageError(f"task {task.key!r}: file {name!r} cannot be written: {problem}") from None


def _agent(trajectory: Trajectory, runtime: Runtime, jail: Jail, workspace: Workspace) -> Agent:
    task = trajectory.task
    return Agent(
        task=task,
        policy=runtime.policy,
        profile=runtime.profile,
        tools=offered_tools(runtime.profile, task),
        workspace=workspace,
        context=ToolContext(jail=jail, limits=task.limits),
        conversation=Conversation(first_messages(runtime.profile, task, workspace.files())),
        sampling=runtime.sampling,
        seed=trajectory.seed,
        put_blob=runtime.store.blobs.put,
        elapsed=sum(turn.ended - turn.started for turn in trajectory.turns),
    )


def _restore_spills(turn: Turn, jail: Jail, runtime: Runtime) -> None:
    """Put whole outputs back where the conversation says that they are: snapshots leave them out."""
    for number, observation in enumerate(turn.observations):
        if observation.blob is not None:
            with suppress(OSError):
                jail.write(spill_path(turn.index, number), runtime.store.blobs.get(observation.blob))


def _drive(agent: Agent, trajectory: Trajectory, runtime: Runtime, on_turn: OnTurn | None) -> Trajectory:
    detail = None
    try:
        while agent.stop is None:
            turn = agent.step()
            runtime.store.append_turn(trajectory.id, turn)
            trajectory = trajectory.model_copy(update={"turns": (*trajectory.turns, turn)})
            if on_turn:
                on_turn(turn)
    except ContextFull as problem:
        agent.stop, detail = StopReason.CONTEXT_FULL, str(problem)
    except PolicyError as problem:
        agent.stop, detail = StopReason.POLICY_ERROR, str(problem)
    except SandboxError as problem:
        agent.stop, detail = StopReason.SANDBOX_ERROR, str(problem)
    except KeyboardInterrupt:
        agent.stop = StopReason.INTERRUPTED
    trajectory = trajectory.model_copy(update={"answer": agent.answer, "diff": agent.workspace.diff()})
    return _finish(trajectory, runtime, agent.stop, detail)


def _finish(trajectory: Trajectory, runtime: Runtime, stop: StopReason, detail: str | None) -> Trajectory:
    ended = time.time()
    runtime.store.finish(
        trajectory.id,
        stop=stop,
        stop_detail=detail,
        answer=trajectory.answer,
        diff=trajectory.diff,
        ended=ended,
    )
    return trajectory.model_copy(update={"stop": stop, "stop_detail": detail, "ended": ended})
