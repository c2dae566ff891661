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


class Feedback(Value):
    kind: FeedbackKind
    value: float | None = None
    """+1 and -1 for thumbs; a score where there is one"""
    text: str | None = None
    """the note, the edited text, or the outcome in words"""
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
