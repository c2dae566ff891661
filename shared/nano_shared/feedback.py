"""Feedback: what people and later events say about a run, a turn, or a span of its text."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from nano_shared.types import Value


class FeedbackKind(StrEnum):
    ACCEPT = "accept"
    REJECT = "reject"
    EDIT = "edit"
    THUMB = "thumb"
    NOTE = "note"
    OUTCOME = "outcome"
    """what became of the work later: merged, reverted, the build broke"""
    PREFER = "prefer"
    """this run rather than the one whose id is the text"""


class Outcome(StrEnum):
    """What became of the work later, as a person or a hook reports it."""

    KEPT = "kept"
    TESTS_PASSED = "tests_passed"
    REVERTED = "reverted"

    @property
    def worth(self) -> float:
        """Between 0 and 1: the value of an outcome row."""
        return 0.0 if self is Outcome.REVERTED else 1.0


class Feedback(Value):
    kind: FeedbackKind
    value: float | None = None
    """+1 and -1 for thumbs; a score where there is one"""
    text: str | None = None
    """the note, the outcome in words, the preferred run's rival, or the edit: of a turn the text that should
    stand in place of it (of its span, where there is one), of a whole run a diff from what it left"""
    turn: int | None = Field(None, ge=0)
    """None speaks of the whole run"""
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
    """A feedback row as the log holds it."""

    id: int
    """in order of arrival"""
    run: str
    feedback: Feedback


_WORKSPACE = "workspace "


def workspace_edit(workspace: str, diff: str) -> str:
    """The text of an EDIT of a whole run: a line that names the edited workspace in the blob store, then the
    unified diff from what the run left to that. Tools that take patches skip such a first line."""
    return f"{_WORKSPACE}{workspace}\n{diff}"


def edited_workspace(feedback: Feedback) -> str | None:
    """The workspace that an EDIT of a whole run left; None for any other row."""
    first = (feedback.text or "").partition("\n")[0]
    if feedback.kind is not FeedbackKind.EDIT or feedback.turn is not None:
        return None
    return first.removeprefix(_WORKSPACE) if first.startswith(_WORKSPACE) else None
