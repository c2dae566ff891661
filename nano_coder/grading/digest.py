"""What a verdict on a run must have been computed from: its `graded_hash`, found again without grading."""

from __future__ import annotations

from nano_coder.grading.check import tree_hash
from nano_coder.grading.command import laid_over, restored
from nano_coder.grading.delivery import Delivery
from nano_coder.grading.grade import graded_files, graded_hash
from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.errors import LogError
from nano_shared.hashing import content_hash
from nano_shared.types import Trajectory


def expected_hash(run: Trajectory, blobs: BlobStore) -> str | None:
    """The hash of what the run left to be graded; None where that cannot be told from the log alone.

    That is: a task without any check, a reward file (whose tree the grader rewrites), a workspace whose
    blobs are not at hand.
    """
    task = run.task
    hidden = task.hidden
    if hidden is not None and hidden.kind == "answer":
        return content_hash(["answer", run.answer])
    after = run.last_snapshot
    if after is None or run.workspace_lost or (hidden is None and task.check is None):
        return None
    if hidden is not None and hidden.kind == "reward_file":
        return None
    try:
        delivery = Delivery(
            before=snapshot.load(run.snapshot or after, blobs),
            after=snapshot.load(after, blobs),
            blobs=blobs,
            answer=run.answer,
        )
        if hidden is None or hidden.kind == "command":
            return _of_tree(run, delivery)
        return graded_hash(run.task, delivery.files(graded_files(run.task)), run.answer)
    except (LogError, snapshot.SnapshotError):
        return None


def _of_tree(run: Trajectory, delivery: Delivery) -> str:
    hidden = run.task.hidden
    tests = hidden.files if hidden is not None else {}
    before = laid_over(delivery.before, tests, delivery.blobs)
    after = laid_over(delivery.after, tests, delivery.blobs)
    command = str(hidden.command if hidden is not None else run.task.check)
    return tree_hash(restored(command, before, after, run.task.artifacts)[0])
