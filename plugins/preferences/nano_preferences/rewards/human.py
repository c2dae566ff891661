"""`human`: feedback on the run by people and later events, from the feedback rows of the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nano_coder.run.execution import Runtime
from nano_rl.rewards.reward import SILENT, Part, Score
from nano_shared.errors import UsageError
from nano_shared.logged_run import Feedback, FeedbackKind
from nano_shared.types import Trajectory

_WORTH = {FeedbackKind.ACCEPT: 1.0, FeedbackKind.EDIT: 0.5, FeedbackKind.REJECT: 0.0}


class Human(Part):
    alone = True

    def score_run(self, run: Trajectory, runtime: Runtime) -> Score:
        """The mean value of the feedback on a run; no score without any."""
        value = opinion(run.id, runtime.store.feedback(run.id))
        return SILENT if value is None else Score(value=value)


def opinion(run: str, rows: Sequence[Feedback]) -> float | None:
    """The mean value of the feedback, 0 to 1; None without any. Raises UsageError out of range."""
    values = [v for row in rows if (v := _value(run, row)) is not None]
    return math.fsum(values) / len(values) if values else None


def _value(run: str, row: Feedback) -> float | None:
    """The value of one row between 0 and 1, or None: accepted 1, edited 0.5, rejected 0; thumbs are scaled
    from -1..1, outcomes from 0..1. Raises UsageError for a value out of its range."""
    if row.kind in _WORTH and row.value is None:
        return _WORTH[row.kind]
    if row.value is None or row.kind is FeedbackKind.NOTE:
        return None
    low = -1.0 if row.kind is FeedbackKind.THUMB else 0.0
    if not low <= row.value <= 1:  # NaN too
        raise UsageError(
            f"run {run}: feedback {row.kind} has the value {row.value:g}; it must lie between {low:g} and 1"
        )
    return (row.value - low) / (1 - low)
