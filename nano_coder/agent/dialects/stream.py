"""Reads a completion while it is sampled: shows reasoning and thought as they come, and calls at the end."""

from __future__ import annotations

from collections.abc import Sequence

from nano_coder.agent.dialects.dialect import Dialect, Parsed
from nano_shared.types import ToolSpec


class StreamParser:
    """Parses a text that arrives in pieces of any size. Text that was returned once is never revised.

    Text is returned as soon as no continuation can change it: text after the possible start of a tag waits,
    and all text waits until the end under a dialect whose calls have no tags, and if the prompt may have
    opened reasoning."""

    def __init__(self, dialect: Dialect, tools: Sequence[ToolSpec]) -> None:
        self._dialect, self._tools = dialect, tools
        self._text = ""
        self._shown = Parsed()

    def feed(self, piece: str) -> Parsed:
        """Adds a piece of the text. Returns the new parts of `reasoning` and `thought`."""
        self._text += piece
        visible = getattr(self._dialect, "visible", None)
        return self._new(visible(self._text, self._tools)) if visible else Parsed()

    def finish(self) -> tuple[Parsed, Parsed]:
        """The parse of the whole text, and the parts that `feed` did not return."""
        whole = self._dialect.parse(self._text, self._tools)
        return whole, self._new(whole)

    def _new(self, seen: Parsed) -> Parsed:
        before, self._shown = self._shown, seen
        return Parsed(
            reasoning=seen.reasoning[len(before.reasoning) :], thought=seen.thought[len(before.thought) :]
        )


def settled(text: str, marks: Sequence[str]) -> str:
    """The text up to the first mark, or to an end that may begin one."""
    ends = [text.find(mark) for mark in marks]
    ends += [at for mark in marks for at in range(max(0, len(text) - len(mark) + 1), len(text))
             if mark.startswith(text[at:])]  # fmt: skip
    return text[: min((end for end in ends if end >= 0), default=len(text))]
