"""A run as the log holds it: its trajectory, every verdict, and the feedback of people and later events."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from nano_shared.types import Trajectory, Value, Verdict


class FeedbackKind(StrEnum):
    ACCEPT = "accept"
    REJECT = "reject"
    EDIT = "edit"
    THUMB = "thumb"
    NOTE = "note"
    OUTCOME = "outcome"
    """kind: what happened to the work later: merged, reverted, broke the build"""
    PREFER = "prefer"
    """kind: this run is preferred to the one whose id is the text"""


class Outcome(StrEnum):
    """What happened to the work later, as a person or a hook reports it."""

    KEPT = "kept"
    TESTS_PASSED = "tests_passed"
    REVERTED = "reverted"

    @property
    def worth(self) -> float:
        """The value of an outcome row, between 0 and 1."""
        return 0.0 if self is Outcome.REVERTED else 1.0


class Feedback(Value):
    kind: FeedbackKind
    value: float | None = None
    """+1 and -1 for thumbs; the score if there is one"""
    text: str | None = None
    """the note; the outcome in words; the id of the run that was not preferred; or the edit: for a turn, the
    text to replace it (or its span), for a whole run, a diff from its result"""
    turn: int | None = Field(None, ge=0)
    """None: the whole run"""
    span: tuple[int, int] | None = None
    """[start, end) in characters of the turn's raw completion text"""
    author: str | None = None
    created: float
    """unix seconds"""

    @model_validator(mode="after")
    def _span_of_a_turn(self) -> Feedback:
        if self.span is not None and self.turn is None:
            raise ValueError("a span needs the turn whose text it points into")
        if self.kind is FeedbackKind.PREFER and not self.text:
            raise ValueError("feedback that prefers a run names the other one's id in `text`")
        if self.span is not None and not 0 <= self.span[0] <= self.span[1]:
            raise ValueError(f"span {self.span} must be [start, end) with 0 <= start <= end")
        return self


class Said(Value):
    """A feedback row of the log."""

    id: int
    """in order of arrival"""
    run: str
    feedback: Feedback


_WORKSPACE = "workspace "


def workspace_edit(workspace: str, diff: str) -> str:
    """The text of an EDIT of a whole run: a first line that names the edited workspace in the blob store,
    then the unified diff from the run's result to it. Patch tools ignore the first line."""
    return f"{_WORKSPACE}{workspace}\n{diff}"


def edited_workspace(feedback: Feedback) -> str | None:
    """The edited workspace of an EDIT of a whole run; None for any other row."""
    first = (feedback.text or "").partition("\n")[0]
    if feedback.kind is not FeedbackKind.EDIT or feedback.turn is not None:
        return None
    return first.removeprefix(_WORKSPACE) if first.startswith(_WORKSPACE) else None


class LoggedRun(Value):
    trajectory: Trajectory
    verdicts: tuple[Verdict, ...] = ()
    """every verdict, newest last; the last one is the trajectory's"""
    feedback: tuple[Feedback, ...] = ()

    @property
    def whole(self) -> Trajectory:
        """The trajectory with the newest of `verdicts`."""
        return self.trajectory.model_copy(update={"verdict": self.verdicts[-1] if self.verdicts else None})

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values. (Pydantic's JSON mode loses half surrogates in keys of objects.)"""
        body: dict[str, Any] = json.loads(json.dumps(self.model_dump()))
        return body
