"""Replay of a logged run: execute its actions again, or feed its samples through today's runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nano_coder.agent.loop import Agent, spill_path
from nano_coder.agent.observation import shorten
from nano_coder.agent.profiles import PROFILES, logged_profile, missing_tools
from nano_coder.agent.prompt import first_started, offered_tools, open_conversation
from nano_coder.agent.workspace import Workspace
from nano_coder.grading.command_run import workspace_jail
from nano_coder.models.replayed import Prompt, PromptRenderer, ReplayedPolicy
from nano_coder.run.replay_differences import Cause, Drift, cause_of, excerpts, explained
from nano_coder.sandbox.protocol import Jail, LazyJail, Sandbox, in_image
from nano_coder.sandbox.workspace_archive import pack_workspace
from nano_coder.tools.registry import TOOLS, RecordedAnswers, recorded_kind
from nano_coder.tools.tool import ToolContext
from nano_shared import snapshot
from nano_shared.blobs import BlobStore, OverlayBlobs
from nano_shared.errors import SandboxError, UsageError
from nano_shared.profile import InterfaceProfile
from nano_shared.scratch import in_memory, scratch_folder
from nano_shared.snapshot import EntryKind
from nano_shared.types import Observation, Sampling, Trajectory, Turn

_EXECUTIONS = 3
"""executions of a run with unexplained drift: what differs among them is random"""


# ---------------------------------------------------------------------------------------- execute


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A run whose recorded actions were executed again from its starting workspace."""

    run: str
    actions: int
    drifts: tuple[Drift, ...]

    @property
    def holds(self) -> bool:
        """Whether all drift is explained by time and randomness."""
        return all(drift.cause.expected for drift in self.drifts)


def execute(run: Trajectory, sandbox: Sandbox, blobs: BlobStore) -> Executed:
    """Execute the recorded actions of a run again with the same tools; logs nothing.

    Raises UsageError for a run without a workspace or with an unknown profile, SandboxError if the sandbox
    fails.
    """
    if run.snapshot is None:
        raise UsageError(f"run {run.id} has no snapshot of its start, so there is nothing to execute it on")
    missing = missing_tools(run.profile)
    if missing and any(
        name not in TOOLS and recorded_kind(name, run) is None for name in run.profile.split("+")[1:]
    ):
        raise UsageError(f"run {run.id} was given {missing}. --view shows it all the same")
    executions = [_execution(run, sandbox, blobs)]
    differing = [key for key, logged in executions[0].logged.items() if logged != executions[0].now.get(key)]
    unseen = [key for key in differing if not _is_explained(key, executions[0])]
    while unseen and len(executions) < _EXECUTIONS:
        executions.append(_execution(run, sandbox, blobs))
        unseen = [key for key in unseen if len({e.now.get(key, "") for e in executions}) == 1]
    drifts = tuple(_drift(run, key, executions) for key in differing)
    return Executed(run=run.id, actions=sum(len(turn.calls) for turn in run.turns), drifts=drifts)


_Key = tuple[int, int | None, str]
"""(turn, call, what)"""


@dataclass(slots=True)
class _Execution:
    """Logged and new values by key, for one execution."""

    logged: dict[_Key, str] = field(default_factory=dict)
    now: dict[_Key, str] = field(default_factory=dict)
    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    """path -> (logged, new) contents of drifted files: a file drifts once, not in every later turn"""


def _is_explained(key: _Key, execution: _Execution) -> bool:
    late = _late(key[0], key[1], execution)
    return late or explained(execution.logged[key], execution.now.get(key, "")) is not None


def _drift(run: Trajectory, key: _Key, executions: list[_Execution]) -> Drift:
    turn, call, what = key
    logged, now = executions[0].logged[key], [e.now.get(key, "") for e in executions]
    calls = run.turns[turn].calls
    action = json.dumps([c.arguments for c in (calls if call is None else calls[call : call + 1])])
    cause = Cause.TIME if _late(turn, call, executions[0]) else cause_of(logged, now, action)
    before, after = excerpts(logged, now[0])
    return Drift(turn=turn, call=call, what=what, cause=cause, logged=before, now=after)


def _late(turn: int, call: int | None, execution: _Execution) -> bool:
    """Whether a call timed out in only one of log and execution, which explains other differences."""
    key = (turn, call, "timed out")
    return execution.logged.get(key) != execution.now.get(key)


def _execution(run: Trajectory, sandbox: Sandbox, blobs: BlobStore) -> _Execution:
    layered = OverlayBlobs(blobs)
    found = _Execution()
    start = str(run.snapshot)
    placed = in_image(sandbox, run.task.image)
    with workspace_jail(snapshot.load(start, blobs), blobs, placed, run.task.limits) as jail:
        workspace = Workspace(jail, layered, start=start, snapshot=start)
        agent = _agent(run, ReplayedPolicy(run, None), jail, workspace, layered)
        agent.record = RecordedAnswers(run, blobs.get, for_fork=False)
        delegated = {turn.delegated_by for turn in run.turns}
        for turn in run.turns:
            for number, call in enumerate(turn.calls):
                if turn.index in delegated and number + 1 == len(turn.calls):
                    continue  # its sub-agent's actions follow
                again = agent.of(turn).execute(number, call)
                if number < len(turn.observations):
                    _compare(found, turn, number, again, blobs)
                    if recorded_kind(call.name, run) and turn.observations[number].files_changed:
                        _restore_files(turn, jail, blobs)
                        workspace.refresh()
                    if (
                        turn.observations[number].blob is not None
                    ):  # the observation says that the output lies there
                        jail.write(spill_path(turn.index, number), again.text.encode())
            _restore_others(turn, jail, blobs)
            if turn.calls and turn.snapshot is not None:
                _compare_files(found, turn, workspace.snapshot, layered)
            agent.turns.append(turn)
    return found


def _compare(found: _Execution, turn: Turn, number: int, again: Observation, blobs: BlobStore) -> None:
    for side, observation in ((found.logged, turn.observations[number]), (found.now, again)):
        facts = {
            "text": _whole(observation, blobs),
            "ok": str(observation.ok),
            "exit code": str(observation.exit_code),
            "signal": str(observation.signal),
            "timed out": str(observation.timed_out),
        }
        side.update({(turn.index, number, what): value for what, value in facts.items()})


def _whole(observation: Observation, blobs: BlobStore) -> str:
    """The whole output, before truncation."""
    return observation.text if observation.blob is None else blobs.get(observation.blob).decode()


def _restore_others(turn: Turn, jail: Jail, blobs: BlobStore) -> None:
    """Restore outputs of observations without a call: those of a reflection."""
    for number in range(len(turn.calls), len(turn.observations)):
        blob = turn.observations[number].blob
        if blob is not None:
            jail.write(spill_path(turn.index, number), blobs.get(blob))


def _restore_files(turn: Turn, jail: Jail, blobs: BlobStore) -> None:
    """Restore the files as the turn left them; changes by recorded tools are only in the log."""
    with scratch_folder("files", in_memory()) as folder:
        snapshot.materialise(str(turn.snapshot), blobs, folder / "work")
        with pack_workspace(folder / "work").stream as packed:
            jail.restore(packed.read())


def _compare_files(found: _Execution, turn: Turn, now: str, blobs: BlobStore) -> None:
    if now == turn.snapshot:
        return
    trees = snapshot.load(str(turn.snapshot), blobs), snapshot.load(now, blobs)
    for path in snapshot.changed_paths(*trees):
        logged, again = (_content(tree, path, blobs) for tree in trees)
        if found.files.get(path) != (logged, again):
            key = (turn.index, None, path)
            found.logged[key], found.now[key] = found.files[path] = logged, again


def _content(tree: snapshot.Snapshot, path: str, blobs: BlobStore) -> str:
    entry = tree.by_path.get(path)
    if entry is None:
        return "(no such file)"
    if entry.kind is not EntryKind.FILE:
        return f"({entry.kind}) {entry.content or ''}"
    return blobs.get(str(entry.content)).decode("utf-8", "backslashreplace") + f"\n(mode {entry.mode:o})"


# ----------------------------------------------------------------------------------------- refeed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDifference:
    """A difference, other than in a prompt, that today's runtime makes of the same log."""

    turn: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refed:
    """A run whose samples were fed through today's runtime."""

    run: str
    prompts: tuple[Prompt, ...]
    differences: tuple[ReplayDifference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def proved(self) -> int:
        """Number of turns whose prompt is token-identical."""
        return sum(prompt.identical for prompt in self.prompts)

    @property
    def first_difference(self) -> Prompt | None:
        return next((prompt for prompt in self.prompts if prompt.differs_at is not None), None)

    @property
    def holds(self) -> bool:
        """Whether nothing differs; prompts that could not be compared do not count."""
        return self.first_difference is None and not self.differences


def refeed(run: Trajectory, reader: PromptRenderer | None, blobs: BlobStore) -> Refed:
    """Feed the samples of a run through today's runtime, and compare every prompt with the log.

    `reader` renders prompts for the model that sampled; None, for a text-only run, compares none. Raises
    UsageError for a run with an unknown profile or with redacted tokens.
    """
    if run.is_redacted:
        raise UsageError(
            f"run {run.id} was redacted: its hidden tokens cannot be held against what is rendered today"
        )
    policy = ReplayedPolicy(run, reader)
    agent = _agent(run, policy, LazyJail(_no_jail), None, blobs)
    differences = []
    for turn in run.turns:
        whose = agent.of(turn)
        if turn.messages:
            whose.conversation.replace_new(turn.messages)
        completion = whose.complete()
        read = whose.parse_calls if run.is_served else whose.parse  # a client's tools are not in the task
        if not turn.is_summary and read(completion).calls != turn.calls:
            differences.append(ReplayDifference(turn=turn.index, what="its text is read as other calls"))
        differences += _cut_otherwise(turn, reader, agent.profile, blobs)
        whose.inherit(turn)
    return Refed(
        run=run.id,
        prompts=tuple(policy.prompts),
        differences=tuple(differences),
        notes=tuple(_notes(run, reader, agent.profile)),
    )


def _cut_otherwise(
    turn: Turn, reader: PromptRenderer | None, profile: InterfaceProfile, blobs: BlobStore
) -> Iterator[ReplayDifference]:
    """Observations that today's version truncates differently."""
    for number, observation in enumerate(turn.observations):
        if observation.blob is None or reader is None:
            continue
        full = blobs.get(observation.blob).decode()
        spill = spill_path(turn.index, number)
        now, _ = shorten(full, reader.count, profile.observation, full_output=spill, tool=observation.tool)
        if now != observation.text:
            yield ReplayDifference(turn=turn.index, what=f"observation {number} would be cut otherwise")


def _notes(run: Trajectory, reader: PromptRenderer | None, profile: InterfaceProfile) -> Iterator[str]:
    if (profile.hash, profile.tools_hash) != (run.profile_hash, run.tools_hash):
        yield f"profile {profile.name} was another one when the run was made"
    if reader is not None and reader.template_hash != run.template_hash:
        yield "the chat template was another one when the run was made"
    if run.stop is None:
        yield "the run never ended: what it would have read next is not in the log"


# ------------------------------------------------------------------------------------------ shared


def _agent(
    run: Trajectory, policy: ReplayedPolicy, jail: Jail, workspace: Workspace | None, blobs: BlobStore
) -> Agent:
    profile = logged_profile(run)
    if profile is None and (missing := missing_tools(run.profile)):
        raise UsageError(f"run {run.id} was given {missing}. --view shows it all the same")
    if profile is None:
        raise UsageError(
            f"run {run.id} was made under profile {run.profile!r}, which this nano does not have; it has"
            f" {', '.join(PROFILES)}. --view shows it all the same"
        )
    start = str(run.snapshot)
    workspace = workspace or Workspace(jail, blobs, start=start, snapshot=start)
    files = workspace.files() if run.snapshot is not None else list(run.task.files)
    return Agent(
        task=run.task,
        policy=policy,
        profile=profile,
        tools=offered_tools(profile, run.task),
        workspace=workspace,
        context=ToolContext(jail=jail, limits=run.task.limits),
        conversation=open_conversation(profile, run.task, files, first_started(run)),
        sampling=Sampling(),
        seed=run.seed,
        put_blob=blobs.put,
    )


def _no_jail() -> Any:
    raise SandboxError("a run that is fed again executes nothing")
