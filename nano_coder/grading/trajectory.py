"""The verdict on one trajectory, by whatever check its task has."""

from __future__ import annotations

from nano_coder.grading.command import grade_command
from nano_coder.grading.grade import grade
from nano_coder.grading.version import GRADER
from nano_coder.sandbox import Sandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.errors import SandboxError
from nano_shared.hashing import content_hash
from nano_shared.types import StopReason, Trajectory, Trust, Verdict


def grade_trajectory(trajectory: Trajectory, sandbox: Sandbox, blobs: BlobStore) -> Verdict | None:
    """The verdict, or None where the task has no check at all.

    A failure of ours, in the run or in the grading, has reward None: it says nothing about the policy.
    """
    task, hidden = trajectory.task, trajectory.task.hidden
    if hidden is None and task.check is None:
        return None
    after = trajectory.last_snapshot
    if trajectory.stop is None or trajectory.stop.ours or after is None:
        return ungraded(str(trajectory.stop or StopReason.INTERRUPTED))
    if hidden is not None and hidden.kind == "answer":
        return grade(task, files={}, answer=trajectory.answer, sandbox=sandbox)
    tree = snapshot.load(after, blobs)
    if hidden is not None and hidden.kind in ("cases", "suite"):
        files = {
            name: blobs.get(str(tree.by_path[name].content))
            for name in task.artifacts
            if name in tree.by_path and tree.by_path[name].kind is snapshot.Kind.FILE
        }
        return grade(task, files=files, answer=None, sandbox=sandbox)
    try:
        return grade_command(
            str(hidden.command if hidden is not None else task.check),
            before=snapshot.load(trajectory.snapshot or after, blobs),
            after=tree,
            blobs=blobs,
            sandbox=sandbox,
            limits=task.limits,
            trust=Trust.HIDDEN if hidden is not None else Trust.USER_CHECK,
            files=hidden.files if hidden is not None else None,
        )
    except SandboxError as problem:
        return ungraded("verifier_error", str(problem))


def ungraded(kind: str, detail: str = "") -> Verdict:
    return Verdict(
        reward=None,
        failure_kind=f"{kind}: {detail}" if detail else kind,
        trust=Trust.NONE,
        grader=GRADER,
        graded_hash=content_hash(""),
    )
