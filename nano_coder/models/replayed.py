"""The replayed policy: answers with what a logged run sampled, and holds every prompt against the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nano_shared import Completion, Conversation, PolicyError, Sampling, Trajectory, Turn


@runtime_checkable
class Reader(Protocol):
    """Whatever renders a conversation to token ids: a chat template with its tokenizer."""

    @property
    def template_hash(self) -> str: ...

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        """[N] ids to append to the row before the next turn is sampled."""
        ...

    def count(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt as today's runtime renders it, beside the one that is logged."""

    turn: int
    tokens: int
    """logged, of this turn's delta"""
    unproved: str | None = None
    """why the two could not be compared"""
    differs_at: int | None = None
    """first place in the delta where they are not the same"""
    logged: int | None = None
    """token there; None behind the end"""
    rendered: int | None = None

    @property
    def identical(self) -> bool:
        return self.unproved is None and self.differs_at is None


class ReplayedPolicy:
    """A Policy that samples nothing. Without a reader no prompt is compared, and no text is counted."""

    def __init__(self, run: Trajectory, reader: Reader | None) -> None:
        self.run = run
        self.prompts: list[Prompt] = []
        self.id = run.turns[-1].completion.policy_id if run.turns else run.policy
        self.version = run.turns[-1].completion.policy_version if run.turns else 0
        self.context_limit = 2**31
        self.template_hash = reader.template_hash if reader else run.template_hash
        self._reader = reader

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The logged completion of the next turn. Raises PolicyError behind the last."""
        if len(self.prompts) == len(self.run.turns):
            raise PolicyError(
                f"run {self.run.id} has {len(self.prompts)} turns, and all of them are replayed"
            )
        turn = self.run.turns[len(self.prompts)]
        self.prompts.append(self._prompt(turn, conversation))
        return turn.completion

    def count(self, text: str) -> int:
        """Tokens of a text by the reader; 0 without one, so that no output is cut."""
        return self._reader.count(text) if self._reader else 0

    def _prompt(self, turn: Turn, conversation: Conversation) -> Prompt:
        tokens = turn.completion.tokens
        if tokens is None:
            return Prompt(turn=turn.index, tokens=0, unproved="text-only: the log has no tokens of this turn")
        if self._reader is None:
            return Prompt(
                turn=turn.index, tokens=len(tokens.context_ids), unproved="no tokenizer to render it"
            )
        rewritten = tokens.row != conversation.row
        rendered = self._reader.delta(_anew(conversation) if rewritten else conversation)
        place = _first_difference(tokens.context_ids, rendered)
        if place is None:
            return Prompt(turn=turn.index, tokens=len(rendered))
        if rewritten:
            why = (
                f"token row {tokens.row} begins with a rewritten history, which the log holds as tokens alone"
            )
            return Prompt(turn=turn.index, tokens=len(tokens.context_ids), unproved=why)
        return Prompt(
            turn=turn.index,
            tokens=len(tokens.context_ids),
            differs_at=place,
            logged=_at(tokens.context_ids, place),
            rendered=_at(rendered, place),
        )


def _anew(conversation: Conversation) -> Conversation:
    """The same messages with nothing rendered: what begins a row where no message was rewritten."""
    return Conversation(conversation.messages)


def _first_difference(logged: tuple[int, ...], rendered: tuple[int, ...]) -> int | None:
    if logged == rendered:
        return None
    pairs = zip(logged, rendered, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(logged), len(rendered)))


def _at(ids: tuple[int, ...], place: int) -> int | None:
    return ids[place] if place < len(ids) else None
