"""Executions: run a task, resume or continue a run, grade it; `execute` is the body of all of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nano_coder import __version__
from nano_coder.agent.actions import WORKSPACE_LOST, Actions, Workspace, shorten, spill_path
from nano_coder.agent.compaction import compaction_of
from nano_coder.agent.dialects.api import Api
from nano_coder.agent.loop import Agent, Dialogue, last_main, observed_last, turn_cost, turn_length
from nano_coder.agent.profiles import (
    COMPACT_1,
    continuing_profile,
    first_started,
    given_tools,
    offered_tools,
    open_conversation,
    serving_profile,
    with_specs,
)
from nano_coder.environment import Environments
from nano_coder.grading.command_check import CommandRun, run_check
from nano_coder.grading.grade import by_grader, find_grader, grade_trajectory, refuse_ungradable, ungraded
from nano_coder.run.git_history import GitHistory, open_with
from nano_coder.sandbox.protocol import Jail, LazyJail, Sandbox, allowed_hosts, connected, covers, in_image
from nano_coder.tools.bash import ANEW, bash
from nano_coder.tools.repair import NEEDS
from nano_coder.tools.tool import RecordedAnswers, ToolContext
from nano_shared import snapshot
from nano_shared.agent_notes import Notes
from nano_shared.errors import (
    BudgetExhausted,
    ConfigError,
    ContextFull,
    EnvironmentFailed,
    GivenUp,
    ImagesRefused,
    PolicyError,
    SandboxError,
    UsageError,
)
from nano_shared.extension_points import Extensions, refuse_missing
from nano_shared.files import in_memory, scratch_folder
from nano_shared.hidden_checks import EnvironmentChecks
from nano_shared.policy import InterfaceProfile, Policy, sees
from nano_shared.store import LogStore, new_run_id
from nano_shared.types import (
    ApiAnswer,
    ApiCall,
    Finish,
    Limits,
    Observation,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    Verdict,
)

if TYPE_CHECKING:
    from nano_coder.config import SearchSettings
    from nano_coder.environment import OpenSession


REFLECTION = "reflection"
"""tool name of the observation that starts the second attempt; no policy can call it"""


class Stop(threading.Event):
    """Set, it ends the runs that have it as interrupted, also in a completion, a tool call or a check.
    Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._jails: set[Jail] = set()

    def set(self) -> None:
        super().set()
        for jail in list(self._jails):
            jail.close()

    def closes(self, jail: Jail) -> None:
        """From now on `set` closes the jail, which ends what runs in it."""
        self._jails.add(jail)
        if self.is_set():
            jail.close()


class StoppedSandbox:
    """A sandbox whose jails a `Stop` closes."""

    def __init__(self, sandbox: Sandbox, stop: Stop) -> None:
        self._sandbox, self._stop = sandbox, stop
        self.name, self.layers, self.python = sandbox.name, sandbox.layers, sandbox.python

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        jail = LazyJail(partial(self._sandbox.open, workspace, limits))
        self._stop.closes(jail)
        return jail

    def with_image(self, name: str | None) -> Sandbox:
        return StoppedSandbox(in_image(self._sandbox, name), self._stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """What is called as a run goes on, by default nothing."""

    start: Callable[[Trajectory], object] = lambda run: None
    turn: Callable[[Turn], object] = lambda turn: None
    grading: Callable[[Trajectory], object] = lambda run: None
    """before the check of a run that has ended"""
    text: Callable[[str], None] | None = None
    """gets a completion's text as it streams"""
    stop: Stop | None = None
    """ends the runs when it is set"""


class ExternalAgent(Protocol):
    """An agent that acts instead of nano's own loop: what an extension of `nano.agents` opens."""

    @property
    def command(self) -> str:
        """By which it was opened."""

    @property
    def mounts(self) -> tuple[Path, ...]:
        """Folders of the host that its jail sees, read-only."""

    def run(self, begun: Trajectory, runtime: Runtime) -> Trajectory | tuple[StopReason, str]:
        """Work on the task of a run that has no turns, and return the run, ended and logged; or why nothing
        is logged, a stop reason that counts as our failure."""


AGENTS: Extensions[Callable[[str, Sequence[str]], ExternalAgent]] = Extensions("nano.agents")
"""what opens an agent, by its command and the folders that its jail sees"""


def open_agent(command: str | None, folders: Sequence[str] = ()) -> ExternalAgent | None:
    """The agent of that command; None without one. Raises UsageError for a missing folder."""
    if command is None:
        return None
    refuse_missing(AGENTS.group, "command")
    return AGENTS.find("command")(command, folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the user set for every run of a command."""

    limits: Mapping[str, Any] = field(default_factory=dict)
    """names and values of `Limits`, in place of the task's own"""
    hosts: frozenset[str] = frozenset()
    """hosts that runs may reach; grading reaches none"""
    search: SearchSettings | None = None
    """search service of `web_search`; None: the documents in the workspace"""
    agent: ExternalAgent | None = None
    """external agent that acts instead of nano's own loop; None: nano's loop"""
    ends_repetition: bool = False
    """whether an answer that repeats itself is ended; rollouts that train sample to the end"""
    at_once: int | None = None
    """rollouts at a time; None: as many as keep the policy busy"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The user's project that runs work on; nothing of it for tasks that bring their files."""

    directory: str | None = None
    """absolute path of the user's directory that tasks' snapshots were taken of"""
    history: GitHistory | None = None
    """its git history, visible to runs; not to grading"""
    notes: Notes | None = None
    """notes that outlive a run; None: no notes"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What every execution needs, in evaluation, collection and training alike."""

    policy: Policy
    sandbox: Sandbox
    store: LogStore
    profile: InterfaceProfile = COMPACT_1
    """the policy's profile; a task that names further tools runs under the profile that adds them"""
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen, so one is enough)
    policy_name: str = ""
    """the policy as the user named it"""
    settings: RunSettings = RunSettings()
    project: Project = Project()
    environments: Environments = Environments()  # noqa: RUF009
    """external environments whose tasks may be run"""
    hooks: RunHooks = RunHooks()
    """what follows the runs; runs side by side take `stop` alone"""


def with_limits(task: Task, limits: Mapping[str, Any]) -> Task:
    changed = task.limits.model_copy(update=dict(limits))
    return task if changed == task.limits else task.model_copy(update={"limits": changed})


def as_served(task: Task, runtime: Runtime) -> Task:
    """The task as its runs are logged: with the user's limits, and the hosts that it may reach, its own or
    else those that the user consented to. Raises UsageError for hosts without the user's consent."""
    task, allowed = with_limits(task, runtime.settings.limits), runtime.settings.hosts
    wanted = allowed_hosts(task.network)
    if missing := sorted(host for host in wanted if not covers(allowed, host)):
        raise UsageError(
            f"task {task.key!r} asks for the network ({task.network}), and nobody consented to {missing[0]};"
            f" --net {task.network} does"
        )
    if wanted or not allowed:
        return task
    return task.model_copy(update={"network": f"allow={','.join(sorted(allowed))}"})


def run_task(
    task: Task, runtime: Runtime, *, seed: int | None = None, run_id: str | None = None
) -> Trajectory:
    """Execute a task from its starting workspace until there is a reason to stop; log each turn.

    `run_id` is one of `new_run_id`; None makes one. Policy and sandbox failures, full contexts and interrupts
    end the run with a stop reason. Raises UsageError for a task that the profile cannot serve and LogError if
    the log cannot be written, or holds a run of that id.
    """
    task, run_id = as_served(task.listed, runtime), run_id or new_run_id()
    runtime = replace(runtime, profile=serving_profile(runtime.profile, task))
    _refuse_unserved(task, runtime)
    _refuse_blind(task, runtime)
    if runtime.settings.agent is not None:
        begun = _new_run(task, runtime, seed, run_id)
        ended = runtime.settings.agent.run(begun, runtime)
        if isinstance(ended, Trajectory):
            return ended
        runtime.store.begin(begun)
        return finish(begun, runtime, *ended)
    if not isinstance(task.hidden, EnvironmentChecks):
        return _run(_new_run(task, runtime, seed, run_id), runtime)
    try:
        session = runtime.environments.start(task)
    except EnvironmentFailed as problem:
        with runtime.store.claim(run_id):
            why = StopReason.ENVIRONMENT_ERROR, str(problem)
            return log_unexecuted(task, runtime, run_id, *why, seed=seed)
    with ExitStack() as failing:
        failing.callback(session.close)
        task = session.joined(task)
        runtime = replace(runtime, profile=with_specs(runtime.profile, session.tools))
        run = _run(_new_run(task, runtime, seed, run_id), runtime, session=session)
        failing.pop_all()
    return run.model_copy(update={"verdict": session.end(run)})


def attempt_task(
    task: Task, runtime: Runtime, *, reflect: int = 0, seed: int | None = None
) -> tuple[Trajectory, ...]:
    """Run a task and grade it; while it fails, make up to `reflect` further attempts that see why. Each
    attempt is a run of its own with its own verdict. Raises as `run_task` does. If the check cannot be run
    again, returns the attempts so far."""
    attempts = [grade_run(run_task(task, runtime, seed=seed), runtime)]
    for _ in range(reflect):
        if not can_reflect(attempts[-1]):
            break
        try:
            attempts.append(grade_run(reflect_run(attempts[-1], runtime, seed=seed), runtime))
        except SandboxError:
            break
    return tuple(attempts)


def can_reflect(run: Trajectory) -> bool:
    """Whether another attempt makes sense: a reward below 1 on a run that can continue, and was not ended by
    a failure of ours or an interruption."""
    ended = run.stop is not None and not run.stop.ours and run.stop is not StopReason.CONTEXT_FULL
    goes_on = ended and bool(run.own_turns) and not isinstance(run.task.hidden, EnvironmentChecks)
    return goes_on and run.reward is not None and run.reward < 1


def passed(run: Trajectory) -> bool:
    return run.reward is not None and run.reward >= 1


def is_reflection(run: Trajectory) -> bool:
    """Whether the run starts with a reflection on the one before it."""
    return bool(run.inherited) and any(
        observation.tool == REFLECTION for observation in run.turns[run.inherited - 1].observations
    )


def reflect_run(failed: Trajectory, runtime: Runtime, *, seed: int | None = None) -> Trajectory:
    """Continue a run that failed its check, in a fork that sees its diff and the check's output; of a hidden
    check only that it failed. It gets as much of every limit as the attempt before. Raises UsageError for a
    run that passed, was not graded or did not end by itself, and SandboxError if the check cannot be run."""
    if not can_reflect(failed):
        raise UsageError(
            f"run {failed.id} has nothing to reflect on; a run that ended by itself and failed its check has"
        )
    turns = observed_last(failed.turns, _reflection(failed, runtime))
    return branch_run(failed, turns, runtime, task=as_much_again(failed, runtime), seed=seed)


def escalate_run(failed: Trajectory, runtime: Runtime, *, from_best: bool = False) -> Trajectory:
    """Run the task of a failed run, its parent, anew under the policy of `runtime`, an API's; graded.

    `from_best` continues the failed run instead, as a second attempt that reads its diff and its check's
    output; a run that nothing can follow is begun anew all the same. Raises as
    `run_task` does.
    """
    if from_best and can_reflect(failed):
        return grade_run(reflect_run(_as_api_run(failed), runtime), runtime)
    return grade_run(branch_run(failed, (), runtime), runtime)


def _as_api_run(run: Trajectory) -> Trajectory:
    """The run as if an API had made its calls: a server reads the history as calls, not as text of another
    dialect. Tokens are left out, since no server takes them."""
    turns = tuple(turn if turn.is_summary else _as_api_turn(turn) for turn in run.turns)
    return run.model_copy(update={"turns": turns})


def _as_api_turn(turn: Turn) -> Turn:
    calls = tuple(
        ApiCall(id=f"call_{turn.index}_{number}", name=call.name, arguments=json.dumps(call.arguments))
        for number, call in enumerate(turn.calls)
    )
    said = turn.thought if calls else turn.completion.text
    changes = {"text": said, "finish": Finish.STOP, "tokens": None, "api": ApiAnswer(calls=calls)}
    completion = turn.completion.model_copy(update=changes)
    return turn.model_copy(update={"completion": completion, "parser": Api.name})


def as_much_again(run: Trajectory, runtime: Runtime) -> Task:
    """The run's task, which allows beside its limits what the run has used."""
    limits, count, own = run.task.limits, runtime.policy.count, run.own_turns
    more = {
        "max_cost": limits.max_cost and limits.max_cost + sum(map(turn_cost, own)),
        "max_turns": limits.max_turns + len(own),
        "max_tokens": limits.max_tokens + sum(turn_length(t, count) for t in own),
        "max_seconds": limits.max_seconds + sum(t.ended - t.started for t in own),
    }
    return run.task.model_copy(update={"limits": limits.model_copy(update=more)})


def _reflection(run: Trajectory, runtime: Runtime) -> Observation:
    started = time.time()
    said, exit_code = _check(run, runtime)
    changes = run.diff.rstrip("\n") or "none"
    full = f"Not solved yet. Your changes:\n{changes}\n{said}\nCorrect it."
    last = last_main(run.turns)
    spill = spill_path(last.index, len(last.observations))
    form = continuing_profile(runtime.profile, run).observation
    text, cut = shorten(full, runtime.policy.count, form, full_output=spill)
    data = full.encode("utf-8", "backslashreplace")
    return Observation(
        tool=REFLECTION, ok=False, text=text.encode("utf-8", "backslashreplace").decode(),
        exit_code=exit_code, bytes_total=len(data), truncated=cut,
        blob=runtime.store.put_blob(data) if cut else None, started=started, ended=time.time(),
    )  # fmt: skip


def _check(run: Trajectory, runtime: Runtime) -> tuple[str, int | None]:
    """Output and exit code of the visible check on the run's result; of hidden checks only that they
    failed."""
    blobs, command = runtime.store.blobs, run.task.check
    if command is None:
        return "It was checked, and failed.", None
    check = CommandRun(command=command, blobs=blobs, sandbox=runtime.sandbox, limits=run.task.limits)
    before, after = (snapshot.load(str(tree), blobs) for tree in (run.snapshot, run.last_snapshot))
    result = run_check(check, before, after)
    output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    ending = "timed out" if result.timed_out else f"exit code {result.exit_code}"
    hidden = " Other checks failed." if result.ok else ""
    return f"Check: {command}\n{output}\n{ending}{hidden}".replace("\n\n", "\n"), result.exit_code


def branch_run(
    parent: Trajectory, turns: Sequence[Turn], runtime: Runtime, *, task: Task | None = None,
    seed: int | None = None,
) -> Trajectory:  # fmt: skip
    """Continue from the first turns of a logged run, in a new run, with the files and tokens of the log.
    No turns: it begins anew. `task` replaces the parent's, for other limits or checks. Raises as `run_task`
    does, and UsageError for a run without a workspace."""
    task = as_served(task or parent.task, runtime)
    profile = continuing_profile(runtime.profile, parent.model_copy(update={"task": task}))
    runtime = replace(runtime, profile=profile)
    _refuse_unserved(task, runtime)
    if parent.snapshot is None:
        raise UsageError(f"run {parent.id} never got a workspace; run the task again")
    begun = {"turns": tuple(turns), "parent": parent.id, "parent_step": len(turns)}
    fork = _new_run(task, runtime, seed, new_run_id(), start=parent.snapshot)
    fork = fork.model_copy(update={**begun, "directory": parent.directory})
    _refuse_blind(fork, runtime)
    return _run(fork, runtime, record=RecordedAnswers(parent, runtime.store.get_blob, after=len(turns)))


def resume_run(run_id: str, runtime: Runtime) -> Trajectory:
    """Continue a run that was killed or interrupted, from its last finished turn. Raises LogError for an
    unknown run or one that another process executes, UsageError for one that ended."""
    run = runtime.store.get(run_id)
    runtime = replace(runtime, profile=continuing_profile(runtime.profile, run))
    with runtime.store.claim(run.id):
        run = runtime.store.get(run.id)
        _refuse_unresumable(run, runtime)
        begun_anew = {"task": as_served(run.task, runtime), "stop": None, "stop_detail": None, "ended": None}
        run = run.model_copy(update=begun_anew)
        with closing(_jail(run, runtime)) as jail:
            runtime.store.reopen(run.id)
            return execute(run, runtime, jail)


def _run(
    begun: Trajectory, runtime: Runtime, *, session: OpenSession | None = None,
    record: RecordedAnswers | None = None,
) -> Trajectory:  # fmt: skip
    with runtime.store.claim(begun.id), closing(_jail(begun, runtime)) as jail:
        if (stop := runtime.hooks.stop) is not None:
            stop.closes(jail)
        runtime.store.begin(begun)
        runtime.hooks.start(begun)
        return execute(begun, runtime, jail, session=session, record=record)


_ENDS = {
    ContextFull: StopReason.CONTEXT_FULL,
    BudgetExhausted: StopReason.MAX_SECONDS,
    ConfigError: StopReason.POLICY_ERROR,  # a refused key
    ImagesRefused: StopReason.POLICY_ERROR,
    PolicyError: StopReason.POLICY_ERROR,
    SandboxError: StopReason.SANDBOX_ERROR,
    EnvironmentFailed: StopReason.ENVIRONMENT_ERROR,
    GivenUp: StopReason.GAVE_UP,
}
"""what ends a run, and as what; the first that fits"""


def execute(
    run: Trajectory, runtime: Runtime, jail: Jail, *, session: OpenSession | None = None,
    record: RecordedAnswers | None = None,
) -> Trajectory:  # fmt: skip
    """One execution, from behind the turns that the run has (a fork's, a resumed run's) to a reason to stop.
    The only place that turns exceptions into stop reasons: a failed rollout is data, not a crash."""
    agent = _agent(run, runtime, jail, session, record)
    # inherited turns cannot end this run; its own, logged before a resume, can
    for turn in run.turns:
        whose = agent.of(turn)
        whose.restore(turn)
        add = whose.replay_turn if turn.index < run.inherited else whose.append_turn
        add(turn)
        for number, observation in enumerate(turn.observations):
            if observation.blob is not None:  # a whole output that was spilled: snapshots leave it out
                with suppress(OSError):
                    jail.write(spill_path(turn.index, number), runtime.store.blobs.get(observation.blob))
    if run.turns:
        _finish_subagent(agent, run, runtime)
    if any(call.name == bash.spec.name for turn in run.turns for call in turn.calls):
        jail.write(ANEW, b"")
    problem: Exception | None = None
    stop = runtime.hooks.stop
    try:
        while agent.stop is None:
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            if (taken := agent.step()) is not None:
                runtime.store.append_turn(run.id, taken)
                runtime.hooks.turn(taken)
            _finish_subagent(agent, run, runtime)
    except tuple(_ENDS) as ended:
        if stop is not None and stop.is_set():  # which closed the jail
            agent.stop = StopReason.INTERRUPTED
        else:
            problem, agent.stop = ended, next(end for kind, end in _ENDS.items() if isinstance(ended, kind))
    except KeyboardInterrupt:
        agent.stop = StopReason.INTERRUPTED
    finally:
        agent.actions.context.held.close()
    assert agent.stop is not None
    detail = None if problem is None else str(problem)
    if agent.stop is StopReason.FINISHED and agent.actions.workspace.lost:
        agent.stop, detail = StopReason.GAVE_UP, WORKSPACE_LOST
    if not agent.stop.ours:  # a sub-agent that was at work ends with the run
        _finish_subagent(agent, run, runtime)
    left = {"turns": tuple(agent.turns), "answer": agent.answer, "diff": agent.actions.workspace.diff()}
    run = finish(run.model_copy(update=left), runtime, agent.stop, detail)
    if isinstance(problem, ConfigError):  # every other run would meet it too
        raise ConfigError(f"{problem}; nano-coder resume {run.id} goes on with the run") from None
    if isinstance(problem, ImagesRefused):
        raise ImagesRefused(f"{problem}; run {run.id} holds what was asked") from None
    return run


def _agent(
    run: Trajectory, runtime: Runtime, jail: Jail, session: OpenSession | None,
    record: RecordedAnswers | None,
) -> Agent:  # fmt: skip
    task, policy, profile, settings = run.task, runtime.policy, runtime.profile, runtime.settings
    workspace = Workspace(
        jail, runtime.store.blobs, start=str(run.snapshot), snapshot=str(run.last_snapshot),
        most_mb=task.limits.workspace_mb,
    )  # fmt: skip
    conversation = open_conversation(profile, task, workspace.files(), first_started(run))
    conversation.on_text, conversation.ends_repetition = runtime.hooks.text, settings.ends_repetition
    conversation.run, conversation.stop = run.id, runtime.hooks.stop
    conversation.get_blob = runtime.store.get_blob
    most, form = task.limits.completion_tokens or runtime.sampling.max_tokens, profile.compaction
    return Agent(
        task=task, profile=profile,
        dialogue=Dialogue(
            policy=policy, conversation=conversation,
            sampling=runtime.sampling.model_copy(update={"seed": run.seed}),
            compaction=compaction_of(form, policy, conversation, most) if form else None,
        ),
        actions=Actions(
            context=ToolContext(
                jail=jail, limits=task.limits, sandbox=runtime.sandbox, network=task.network,
                notes=runtime.project.notes, check=task.check, search=settings.search, run_id=run.id,
            ),
            workspace=workspace, profile=profile, count=policy.count, put_blob=runtime.store.put_blob,
            put_image=runtime.store.blobs.put if sees(policy) else None, session=session, record=record,
        ),
        began=time.monotonic() - sum(turn.ended - turn.started for turn in run.turns),
    )  # fmt: skip


def _jail(run: Trajectory, runtime: Runtime) -> LazyJail:
    """A jail on the run's newest workspace, opened when the first tool needs it. Raises as `in_image`."""
    task, history = run.task, runtime.project.history
    placed = in_image(runtime.sandbox, task.image)

    def opener() -> Jail:
        with scratch_folder("start", in_memory()) as folder:
            start = folder / "work"
            snapshot.materialise(str(run.last_snapshot), runtime.store.blobs, start)
            sandbox = connected(placed, allowed_hosts(task.network))
            if history is not None:
                return open_with(history, sandbox, start, task.limits)
            return sandbox.open(start, task.limits)

    return LazyJail(opener)


def _finish_subagent(agent: Agent, run: Trajectory, runtime: Runtime) -> None:
    if (answered := agent.finish_subagent()) is not None:
        runtime.store.add_observation(run.id, *answered)


def finish(run: Trajectory, runtime: Runtime, stop: StopReason, detail: str | None) -> Trajectory:
    ended = time.time()
    runtime.store.finish(run.id, stop=stop, stop_detail=detail, answer=run.answer, diff=run.diff, ended=ended)
    return run.model_copy(update={"stop": stop, "stop_detail": detail, "ended": ended})


def log_unexecuted(
    task: Task, runtime: Runtime, run_id: str, stop: StopReason, why: str, *, seed: int | None = None
) -> Trajectory:
    """Log a run that ended before its first turn; nobody can begin one of its id any more. Raises LogError if
    the log holds it."""
    run = _new_run(as_served(task.listed, runtime), runtime, seed, run_id)
    runtime.store.begin(run)
    return finish(run, runtime, stop, why)


def run_without_turns(task: Task, runtime: Runtime) -> Trajectory:
    """A run without any turn, not logged: for grading a task's starting workspace."""
    return _new_run(task, runtime, None, new_run_id()).model_copy(update={"stop": StopReason.GAVE_UP})


def _new_run(
    task: Task, runtime: Runtime, seed: int | None, run_id: str, *, start: str | None = None
) -> Trajectory:
    """A run before its first turn, on the snapshot `start`; None is the task's own workspace."""
    start = start or task.snapshot
    try:
        start = start or snapshot.snapshot_texts(task.files, runtime.store.blobs)
    except snapshot.SnapshotError as problem:
        raise UsageError(f"task {task.key!r}: its files cannot be written: {problem}") from None
    profile = runtime.profile
    return Trajectory(
        id=run_id, task=task, runtime_version=__version__, profile=profile.name, profile_hash=profile.hash,
        template_hash=runtime.policy.template_hash, tools_hash=profile.tools_hash,
        given_tools=given_tools(profile), policy=runtime.policy_name or runtime.policy.id, snapshot=start,
        directory=runtime.project.directory, started=time.time(), seed=seed,
    )  # fmt: skip


def grade_run(trajectory: Trajectory, runtime: Runtime) -> Trajectory:
    """Grade a finished run in a fresh jail, and log the verdict; of an environment's run, log what it gave. A
    task without a check gets no verdict, nor does a run whose grading the hooks' `stop` ended."""
    runtime.hooks.grading(trajectory)
    sandbox, stop = runtime.sandbox, runtime.hooks.stop
    if isinstance(trajectory.task.hidden, EnvironmentChecks):
        verdict = trajectory.verdict or ungraded(str(trajectory.stop), trajectory.stop_detail or "")
    else:
        if stop is not None:
            sandbox = StoppedSandbox(sandbox, stop)
        found: Verdict | None = grade_trajectory(trajectory, sandbox, runtime.store.blobs)
        # what a jail that was closed says is no result, but for a pass, which nothing ends early
        if found is None or (stop is not None and stop.is_set() and (found.reward or 0.0) < 1):
            return trajectory
        verdict = found
    runtime.store.add_verdict(trajectory.id, verdict)
    return trajectory.model_copy(update={"verdict": verdict})


def regrade_run(run: str, store: LogStore, sandbox: Sandbox, grader: str | None = None) -> Trajectory:
    """Grade a logged run from its stored files, and add the verdict to those it has. Executes nothing of the
    run again. Raises LogError for an unknown run, UsageError for an unknown grader, for a run that has not
    ended and for one whose task has no check."""
    name = find_grader(grader)
    trajectory = store.get(run)
    if trajectory.stop is None:
        raise UsageError(
            f"run {trajectory.id} has not ended; nano-coder resume {trajectory.id} goes on with it"
        )
    if isinstance(trajectory.task.hidden, EnvironmentChecks):
        raise UsageError(
            f"run {trajectory.id} was graded by its environment while it was open; it cannot be graded again"
        )
    verdict = grade_trajectory(trajectory, sandbox, store.blobs)
    if verdict is None:
        raise UsageError(f"run {trajectory.id} has no check to be graded by (task {trajectory.task.key!r})")
    verdict = by_grader(name, verdict)
    store.add_verdict(trajectory.id, verdict)
    return trajectory.model_copy(update={"verdict": verdict})


def refuse_served(trajectory: Trajectory) -> None:
    """Raises UsageError for a conversation that a client led."""
    if trajectory.is_served:
        raise UsageError(
            f"run {trajectory.id} is a conversation of a client of nano-coder serve, and only that client"
            " goes on with it"
        )


def refuse_ended(trajectory: Trajectory) -> None:
    """Raises UsageError for a run that ended by itself, and for a client's."""
    refuse_served(trajectory)
    if trajectory.stop not in (None, StopReason.INTERRUPTED, StopReason.POLICY_ERROR):
        raise UsageError(
            f"run {trajectory.id} ended ({trajectory.stop}); only a killed or interrupted run, or one"
            " whose model failed, resumes"
        )


def _refuse_unserved(task: Task, runtime: Runtime) -> None:
    """Raises UsageError or ConfigError for a task that cannot be served, before it is logged."""
    offered_tools(runtime.profile, task)
    refuse_ungradable(task)
    if runtime.profile.places and not task.check:
        raise UsageError(f"the profile {runtime.profile.name} {NEEDS}: task {task.key!r} has none")
    if runtime.settings.agent is not None and isinstance(task.hidden, EnvironmentChecks):
        raise UsageError(
            "an agent of others brings its own tools, and not those of --env; leave one of them out"
        )
    if runtime.settings.agent is not None and task.network != "none":
        raise UsageError(f"an agent of others has no way out but its model ({task.network}); leave out --net")
    refuse_unpriced(runtime.policy, task.limits.max_cost)


def _refuse_blind(shows: Task | Trajectory, runtime: Runtime) -> None:
    """Raises ImagesRefused for images that the policy does not see."""
    if shows.images and not (sees(runtime.policy) and runtime.settings.agent is None):
        who = "an agent of others" if runtime.settings.agent else runtime.policy_name or runtime.policy.id
        raise ImagesRefused(
            f"{who} sees no images, and {len(shows.images)} would be shown; name a model that sees, as"
            " --model openai:NAME or vision:FOLDER, or leave the images out"
        )


def refuse_unpriced(policy: Policy, max_cost: float | None) -> None:
    """Raises ConfigError for a limit of dollars on a policy whose price is not known."""
    # policies that cost nothing have no `price` at all
    if max_cost is not None and getattr(policy, "price", 0) is None:
        raise ConfigError(
            f"max_cost = {max_cost:g}: the price of {policy.id} is not known; write"
            f" [prices.{policy.id.partition(':')[2]!r}] with input and output, dollars for a million tokens,"
            " into your configuration"
        )


def _refuse_unresumable(trajectory: Trajectory, runtime: Runtime) -> None:
    """Raises UsageError for a run that cannot be resumed."""
    run, profile = trajectory.id, runtime.profile
    refuse_ended(trajectory)
    if trajectory.is_redacted:
        raise UsageError(
            f"run {run} was redacted: what the model read is not in the log any more, so it cannot go on; run"
            f" the task again, or take what it did with nano-coder apply {run}"
        )
    if trajectory.snapshot is None:
        raise UsageError(f"run {run} never got a workspace; run the task again")
    if trajectory.tools_hash != profile.tools_hash and profile.name == trajectory.profile:
        raise UsageError(
            f"run {run} was made with other tools than profile {profile.name} has now: one of them was"
            " changed; resume it with those that it was given"
        )
    made_under = trajectory.profile_hash, trajectory.template_hash
    if made_under != (profile.hash, runtime.policy.template_hash):
        raise UsageError(
            f"run {run} was made under profile {trajectory.profile} with another template than "
            f"this policy's; resume it with --model {trajectory.policy}"
        )
