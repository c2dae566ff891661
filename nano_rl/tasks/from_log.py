"""Tasks from logged runs: the starting workspace of a run, its prompt, and a check, graded again."""

from __future__ import annotations

from dataclasses import dataclass

from nano_coder.grading.grade import grade_trajectory
from nano_coder.sandbox.protocol import Sandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.hashing import content_hash
from nano_shared.hidden_checks import CommandChecks, SuiteChecks, WorkspaceChecks
from nano_shared.snapshot import EntryKind, Snapshot
from nano_shared.types import OracleAction, Provenance, Task, Trajectory, Trust

GENERATOR = "nano-rl tasks from-log"
MOST_BYTES = 1 << 20
"""largest size of starting files that a task row contains; larger ones stay in the blob store"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTask:
    """A task from a run, with the reward of that run."""

    task: Task
    run: str
    reward: float | None
    """of the run under the task's check; None if it could not be graded"""
    failure_kind: str | None = None
    """why the check gave no verdict, such as `check_not_found`"""

    @property
    def trust(self) -> Trust:
        """The trust level of a verdict on the task."""
        hidden = self.task.hidden
        if hidden is None or isinstance(hidden, WorkspaceChecks):
            own = hidden is None and not self.task.check_trusted
            return Trust.NONE if own else Trust.USER_CHECK
        strict = isinstance(hidden, SuiteChecks) and hidden.suite.strict
        return Trust.STRICT if strict else Trust.HIDDEN

    @property
    def portable(self) -> bool:
        """True if the row contains its files; otherwise it needs the blobs of its log."""
        return self.task.snapshot is None


def task_from_run(
    run: Trajectory, blobs: BlobStore, sandbox: Sandbox, check: str | None = None
) -> LoggedTask:
    """A task with the starting workspace of a run. Its check is `check`, which is hidden, or the run's own.

    If the run passes the check, its actions are the oracle. Raises UsageError for a run without a snapshot of
    its start, with missing blobs, or without a check.
    """
    if run.snapshot is None:
        raise UsageError(
            f"run {run.id} has no snapshot of the workspace that it started in (it was imported, or never got"
            " one), so no task can be made of it"
        )
    task = _task(run, snapshot.load(run.snapshot, blobs), blobs, check)
    ended = run.stop is not None and not run.stop.ours
    judged = run.model_copy(update={"task": task})
    verdict = grade_trajectory(judged, sandbox, blobs) if ended else None
    reward = verdict.reward if verdict is not None else None
    if reward == 1:
        oracle = _oracle(run)
        limits = task.limits.model_copy(update={"max_turns": max(task.limits.max_turns, len(oracle))})
        task = task.model_copy(update={"oracle": oracle, "limits": limits})
    failure = verdict.failure_kind if verdict is not None else None
    return LoggedTask(task=task, run=run.id, reward=reward, failure_kind=failure)


def distinct(made: list[LoggedTask]) -> list[LoggedTask]:
    """One task per key, in order, preferably one with an oracle."""
    kept: dict[str, LoggedTask] = {}
    for logged in made:
        known = kept.get(logged.task.key)
        if known is None or (known.task.oracle is None and logged.task.oracle is not None):
            kept[logged.task.key] = logged
    return list(kept.values())


def _task(run: Trajectory, start: Snapshot, blobs: BlobStore, check: str | None) -> Task:
    origin = run.task
    if check is None and origin.check is None and origin.hidden is None:
        raise UsageError(f"run {run.id} has no check of its own; give one with --check")
    files = texts_of(start, blobs)
    hidden = CommandChecks(command=check) if check is not None else origin.hidden
    graded = [origin.check, hidden.full_dump() if hidden else None]
    digest = content_hash([origin.prompt, run.snapshot, graded]).removeprefix("sha256:")[:16]
    return origin.model_copy(
        update={
            "key": f"log-{digest}",
            "files": files or {},
            "snapshot": None if files is not None else run.snapshot,
            "hidden": hidden,
            "oracle": None if check is not None else origin.oracle,
            "provenance": Provenance(source=f"log: run {run.id}", generator=GENERATOR),
        }
    )


def texts_of(tree: Snapshot, blobs: BlobStore) -> dict[str, str] | None:
    """Path -> text; None if the tree has links, executables, binary files, empty folders or too many
    bytes."""
    files: dict[str, str] = {}
    size = 0
    for entry in tree.entries:
        if entry.kind is EntryKind.DIRECTORY:
            if not any(path.startswith(f"{entry.path}/") for path in tree.by_path):
                return None
            continue
        if entry.kind is not EntryKind.FILE or entry.mode & 0o111:
            return None
        data = blobs.get(str(entry.content))
        size += len(data)
        try:
            entry.path.encode()
            files[entry.path] = data.decode()
        except UnicodeError:
            return None
        if size > MOST_BYTES:
            return None
    return files


def _oracle(run: Trajectory) -> tuple[OracleAction, ...]:
    """The actions of the run, with `submit` added at the end if it is missing."""
    actions = [
        OracleAction(name=call.name, arguments=call.arguments, thought=turn.thought if first == 0 else "")
        for turn in run.turns
        for first, call in enumerate(turn.calls)
    ]
    if not actions or actions[-1].name != "submit":
        actions.append(OracleAction(name="submit"))
    return tuple(actions)
