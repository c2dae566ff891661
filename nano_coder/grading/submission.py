"""Submissions: what an agent left, in a folder or a log, handed to the grader of its task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from nano_coder.grading.command_check import grade_command, laid_over, restored
from nano_coder.grading.command_run import tree_hash
from nano_coder.grading.grade import decided, grade, graded_files, shortened, ungraded
from nano_coder.grading.graders import GRADER, Decider, trust_of
from nano_coder.grading.protected_files import LINTERS
from nano_coder.grading.reward_file import grade_reward_file
from nano_coder.grading.submitted_folder import changed_since, read_folder
from nano_coder.sandbox.protocol import Sandbox, in_image
from nano_shared import snapshot
from nano_shared.blobs import BlobStore, MemoryBlobs
from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import (
    AnswerChecks,
    RewardFileChecks,
    SuiteChecks,
    WorkspaceChecks,
    expects_answer,
)
from nano_shared.snapshot import Entry, EntryKind, Snapshot, make_snapshot
from nano_shared.types import StopReason, Tampering, Task, Trajectory, Verdict

RESULTS = ("reward.txt", "reward.json", "verdict.json", "junit*.xml", ".nano-*")
PROGRAMS = (
    "python",
    "python3",
    "pytest",
    "py.test",
    "pip",
    "git",
    "bash",
    "sh",
    "env",
    "node",
    "make",
    "curl",
)
_EXECUTABLE = 0o111


def planted(task: Task, delivery: Delivery, graded: Collection[str]) -> tuple[Tampering, ...]:
    """Findings: changed tests, and added configuration, modules, programs and result files."""
    before, after = delivery.before, delivery.after
    left = {*graded, *(e.path for e in after.entries if PurePosixPath(e.path).name in LINTERS)}
    kept = Snapshot(tuple(entry for entry in after.entries if entry.path not in left))
    original = Snapshot(tuple(entry for entry in before.entries if entry.path not in left))
    found = restored("", original, kept, delivery.blobs).found
    new = [entry for entry in kept.entries if entry.path not in before.by_path]
    return (*found, *(finding for entry in new for finding in _of(entry, task)))


def _of(entry: Entry, task: Task) -> Iterator[Tampering]:
    name = PurePosixPath(entry.path).name
    hidden = task.hidden.suite.files if isinstance(task.hidden, SuiteChecks) else {}
    if entry.kind is EntryKind.DIRECTORY:
        return
    if any(fnmatch(name, pattern) for pattern in RESULTS):
        yield Tampering(kind="reward_written", detail=f"{entry.path!r} was planted; no grader reads it")
    if name in {PurePosixPath(test).name for test in hidden}:
        yield Tampering(kind="tests", detail=f"{entry.path!r} has the name of a hidden test; it was not run")
    if name in PROGRAMS and entry.mode & _EXECUTABLE:
        yield Tampering(kind="shadowing", detail=f"{entry.path!r} stands in for a program; it was not run")


_ANSWERS = ("answer", "answer.txt")
"""files whose text is the answer if none was submitted"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A submission: the trees before and after, the bytes of their files, and the answer."""

    before: Snapshot
    """the workspace before the first action"""
    after: Snapshot
    """the workspace as the agent left it"""
    blobs: BlobStore
    answer: str | None = None
    """as given to `submit`"""

    def files(self, names: Iterable[str]) -> dict[str, bytes]:
        """The regular files among `names`."""
        found = ((name, self.after.by_path.get(name)) for name in names)
        return {
            name: self.blobs.get(str(entry.content))
            for name, entry in found
            if entry is not None and entry.kind is EntryKind.FILE
        }

    @property
    def others(self) -> frozenset[str]:
        """Those of `names` that exist and are no regular files."""
        return frozenset(entry.path for entry in self.after.entries if entry.kind is not EntryKind.FILE)


def grade_delivery(
    task: Task, delivery: Delivery, sandbox: Sandbox, *, timeout: float | None = None
) -> Verdict | None:
    """The verdict of the task's check, of whatever kind; None if it has none.

    A failure of ours has reward None: it says nothing about the policy. `timeout` is of a check by command,
    in seconds, in place of its usual one.
    """
    hidden = task.hidden
    if hidden is None and task.check is None:
        return None
    sandbox = in_image(sandbox, task.image)
    if hidden is not None and not isinstance(hidden, WorkspaceChecks):
        wanted = graded_files(task)
        verdict = grade(
            task,
            files=delivery.files(wanted),
            others=delivery.others,
            answer=delivery.answer,
            sandbox=sandbox,
        )
        return flagged(verdict, planted(task, delivery, wanted))
    start = replace(delivery, after=delivery.before)
    return decided(
        lambda: _grade_tree(task, hidden, delivery, sandbox, timeout),
        lambda: _grade_tree(task, hidden, start, sandbox, timeout),
        graded_hash=tree_hash(delivery.after),
    )


def _grade_tree(
    task: Task, hidden: WorkspaceChecks | None, delivery: Delivery, sandbox: Sandbox, timeout: float | None
) -> Verdict:
    """The verdict of a command on the whole workspace. Raises whatever goes wrong."""
    tests = hidden.files if hidden is not None else {}
    before = laid_over(delivery.before, tests, delivery.blobs)
    after = laid_over(delivery.after, tests, delivery.blobs)
    if isinstance(hidden, RewardFileChecks):
        return grade_reward_file(
            hidden,
            before=before,
            after=after,
            blobs=delivery.blobs,
            sandbox=sandbox,
            limits=task.limits,
            editable=task.artifacts,
        )
    return grade_command(
        hidden.command if hidden is not None else str(task.check),
        before=before,
        after=after,
        blobs=delivery.blobs,
        sandbox=sandbox,
        limits=task.limits,
        timeout=timeout,
        decider=Decider.COMMAND if hidden is not None or task.check_trusted else Decider.STRANGER,
        hidden=tests if hidden is not None else None,
        editable=task.artifacts,
    )


def grade_folder(task: Task, directory: Path, answer: str | None, sandbox: Sandbox) -> Verdict:
    """Grade a folder of this machine, which is read once and not trusted.

    Without `answer`, a file called "answer" is the answer. Raises UsageError for a task without a check, for
    one whose starting workspace is in a log, and for a path that is no folder.
    """
    blobs = MemoryBlobs()
    if task.snapshot is not None:
        raise UsageError(
            f"task {task.key!r} starts from a logged workspace; grade its run with nano-rl grade RUN"
        )
    texts = {name: text.encode("utf-8", "surrogatepass") for name, text in task.files.items()}
    before = make_snapshot(
        Entry(name, EntryKind.FILE, 0o644, blobs.put(data)) for name, data in texts.items()
    )
    wanted = graded_files(task) or (_ANSWERS if isinstance(task.hidden, AnswerChecks) else ())
    left = read_folder(directory, blobs, wanted)
    delivery = Delivery(before=before, after=left.tree, blobs=blobs, answer=answer)
    if answer is None and expects_answer(task.hidden):
        found = delivery.files(_ANSWERS)
        text = next((found[name] for name in _ANSWERS if name in found), None)
        answer = None if text is None else text.decode("utf-8", "replace")
        delivery = Delivery(before=before, after=left.tree, blobs=blobs, answer=answer)
    verdict = grade_delivery(task, delivery, sandbox)
    if verdict is None:
        raise UsageError(f"task {task.key!r} has no check; give it hidden checks or a `check`")
    changed = changed_since(directory, left)
    return flagged(verdict, [*left.findings, *changed], worthless=bool(changed))


def flagged(verdict: Verdict, findings: Iterable[Tampering], *, worthless: bool = False) -> Verdict:
    """The verdict with further findings; `worthless`: the reward becomes 0, unless the failure was ours."""
    known = verdict.tampering
    more = tuple(found for found in findings if found not in known)
    update: dict[str, object] = {"tampering": (*known, *more)}
    if worthless and verdict.reward is not None:
        update["reward"] = 0.0
    return shortened(verdict.model_copy(update=update))


def grade_trajectory(trajectory: Trajectory, sandbox: Sandbox, blobs: BlobStore) -> Verdict | None:
    """The verdict of the run's task; None if the task has no check. Executes nothing of the run again.

    A failure of ours, in the run or in the grading, has reward None: it says nothing about the policy.
    """
    if trajectory.task.hidden is None and trajectory.task.check is None:
        return None
    after = trajectory.last_snapshot
    if trajectory.stop is None or trajectory.stop.ours or after is None:
        return ungraded(str(trajectory.stop or StopReason.INTERRUPTED))
    hidden = trajectory.task.hidden
    if trajectory.workspace_lost and not isinstance(hidden, AnswerChecks):
        return Verdict(
            reward=0.0,
            components={"tests": 0.0},
            checks={"workspace": "error"},
            failure_kind="workspace_lost",
            trust=trust_of(Decider.APART),
            grader=GRADER,
            graded_hash=content_hash(""),
        )
    delivery = Delivery(
        before=snapshot.load(trajectory.snapshot or after, blobs),
        after=snapshot.load(after, blobs),
        blobs=blobs,
        answer=trajectory.answer,
    )
    return grade_delivery(trajectory.task, delivery, sandbox)
