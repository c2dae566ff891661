"""The replayed policy: answers with the samples of a logged run, and compares every prompt with the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from nano_shared.errors import PolicyError
from nano_shared.policy import Conversation
from nano_shared.types import Completion, Sampling, Trajectory, Turn


@runtime_checkable
class PromptRenderer(Protocol):
    """Renders a conversation to token ids: a chat template with its tokenizer."""

    @property
    def template_hash(self) -> str: ...

    def delta(self, conversation: Conversation) -> tuple[int, ...]:
        """[N] ids to append to the row before the next turn is sampled."""
        ...

    def count(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Comparison of one prompt, as today's runtime renders it, with the logged one."""

    turn: int
    tokens: int
    """number of tokens in the logged delta of this turn"""
    not_compared: str | None = None
    """why the two could not be compared; None if they were"""
    differs_at: int | None = None
    """index of the first difference in the delta; None if there is none"""
    logged: int | None = None
    """logged token there; None after the end"""
    rendered: int | None = None

    @property
    def identical(self) -> bool:
        return self.not_compared is None and self.differs_at is None


class ReplayedPolicy:
    """A Policy that samples nothing. Without a reader it compares no prompts and counts no tokens."""

    def __init__(self, run: Trajectory, reader: PromptRenderer | None) -> None:
        self.run = run
        self.prompts: list[Prompt] = []
        self.id = run.turns[-1].completion.policy_id if run.turns else run.policy
        self.version = run.turns[-1].completion.policy_version if run.turns else 0
        self.context_limit = 2**31
        self.template_hash = reader.template_hash if reader else run.template_hash
        self._reader = reader

    def complete(self, conversation: Conversation, sampling: Sampling) -> Completion:
        """The logged completion of the next turn. Raises PolicyError after the last."""
        if len(self.prompts) == len(self.run.turns):
            raise PolicyError(
                f"run {self.run.id} has {len(self.prompts)} turns, and all of them are replayed"
            )
        turn = self.run.turns[len(self.prompts)]
        self.prompts.append(self._prompt(turn, conversation))
        return turn.completion

    def count(self, text: str) -> int:
        """Number of tokens by the reader; 0 without one, so that no output is cut."""
        return self._reader.count(text) if self._reader else 0

    def _prompt(self, turn: Turn, conversation: Conversation) -> Prompt:
        tokens = turn.completion.tokens
        if tokens is None:
            return Prompt(
                turn=turn.index, tokens=0, not_compared="text-only: the log has no tokens of this turn"
            )
        if self._reader is None:
            return Prompt(
                turn=turn.index, tokens=len(tokens.context_ids), not_compared="no tokenizer to render it"
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
            return Prompt(turn=turn.index, tokens=len(tokens.context_ids), not_compared=why)
        return Prompt(
            turn=turn.index,
            tokens=len(tokens.context_ids),
            differs_at=place,
            logged=_at(tokens.context_ids, place),
            rendered=_at(rendered, place),
        )


def _anew(conversation: Conversation) -> Conversation:
    """A conversation with the same messages, none of them rendered: the start of a new row."""
    return Conversation(conversation.messages, tools=conversation.tools, started=conversation.started)


def _first_difference(logged: tuple[int, ...], rendered: tuple[int, ...]) -> int | None:
    if logged == rendered:
        return None
    pairs = zip(logged, rendered, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(logged), len(rendered)))


def _at(ids: tuple[int, ...], place: int) -> int | None:
    return ids[place] if place < len(ids) else None
