"""Tasks of logged runs: the workspace that a run started in, its prompt, and a check graded afresh."""

from __future__ import annotations

from dataclasses import dataclass

from nano_coder.grading.submission import grade_trajectory
from nano_coder.sandbox.protocol import Sandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.errors import UsageError
from nano_shared.hashing import content_hash
from nano_shared.snapshot import Kind, Snapshot
from nano_shared.types import HiddenChecks, OracleAction, Provenance, Task, Trajectory, Trust

GENERATOR = "nano-rl tasks from-log"
MOST_BYTES = 1 << 20
"""of starting files that a row holds itself; more stay in the blob store"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTask:
    """A task of a run, and how the run itself does by it."""

    task: Task
    run: str
    reward: float | None
    """of the run's own result under the task's check; None where that could not be graded"""
    failure_kind: str | None = None
    """why the check itself did not come to a judgement: `check_not_found` where it names no program"""

    @property
    def trust(self) -> Trust:
        """How far a verdict on the task can be believed."""
        hidden = self.task.hidden
        if hidden is None or hidden.kind in ("command", "reward_file"):
            return Trust.USER_CHECK
        return Trust.STRICT if hidden.suite is not None and hidden.suite.strict else Trust.HIDDEN

    @property
    def portable(self) -> bool:
        """Whether the row holds its files itself; otherwise it needs the blobs of its log."""
        return self.task.snapshot is None


def task_from_run(
    run: Trajectory, blobs: BlobStore, sandbox: Sandbox, check: str | None = None
) -> LoggedTask:
    """A task that begins where the run began. Its check is `check`, which no agent sees, or the run's own.

    A run that passes it gives its actions as the oracle. Raises UsageError for a run without a snapshot of
    its start, for one whose blobs are gone and for one without any check.
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
    """One of each key, in order: runs of one task make one, with the oracle of whichever passed."""
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
    files = _texts(start, blobs)
    hidden = HiddenChecks(kind="command", command=check) if check is not None else origin.hidden
    graded = [origin.check, hidden.model_dump(mode="json") if hidden else None]
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


def _texts(tree: Snapshot, blobs: BlobStore) -> dict[str, str] | None:
    """The tree as texts by path, or None where they cannot hold it: links, programs, bytes, empty folders."""
    files: dict[str, str] = {}
    size = 0
    for entry in tree.entries:
        if entry.kind is Kind.DIRECTORY:
            if not any(path.startswith(f"{entry.path}/") for path in tree.by_path):
                return None
            continue
        if entry.kind is not Kind.FILE or entry.mode & 0o111:
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
    """The run's actions one by one, and `submit` at the end where it stopped without."""
    actions = [
        OracleAction(name=call.name, arguments=call.arguments, thought=turn.thought if first == 0 else "")
        for turn in run.turns
        for first, call in enumerate(turn.calls)
    ]
    if not actions or actions[-1].name != "submit":
        actions.append(OracleAction(name="submit"))
    return tuple(actions)
