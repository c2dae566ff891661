"""The verdict on one trajectory, by whatever check its task has."""

from __future__ import annotations

from nano_coder.grading.delivery import Delivery, grade_delivery
from nano_coder.grading.grade import ungraded
from nano_coder.grading.version import GRADER
from nano_coder.sandbox import Sandbox
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.hashing import content_hash
from nano_shared.types import StopReason, Trajectory, Trust, Verdict


def grade_trajectory(trajectory: Trajectory, sandbox: Sandbox, blobs: BlobStore) -> Verdict | None:
    """The verdict, or None where the task has no check at all. Nothing of the run is executed again.

    A failure of ours, in the run or in the grading, has reward None: it says nothing about the policy.
    """
    if trajectory.task.hidden is None and trajectory.task.check is None:
        return None
    after = trajectory.last_snapshot
    if trajectory.stop is None or trajectory.stop.ours or after is None:
        return ungraded(str(trajectory.stop or StopReason.INTERRUPTED))
    hidden = trajectory.task.hidden
    if trajectory.workspace_lost and (hidden is None or hidden.kind != "answer"):
        return Verdict(
            reward=0.0,
            components={"tests": 0.0},
            checks={"workspace": "error"},
            failure_kind="workspace_lost",
            trust=Trust.USER_CHECK if hidden is None else Trust.HIDDEN,
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
