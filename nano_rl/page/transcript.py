"""A logged run as a page shows it: what was asked, each turn with its tokens, and the verdict."""

from __future__ import annotations

import json
from dataclasses import dataclass

from nano_rl.page.choose import Choice
from nano_rl.page.tokens import Decode, Piece, pieces
from nano_shared.errors import LogError
from nano_shared.store import LogStore
from nano_shared.types import Observation, Trajectory, Turn

LONGEST = 20_000
"""characters of one text that are shown: a page is to be opened on a phone"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    number: int
    """from 1"""
    pieces: tuple[Piece, ...]
    """sampled tokens; empty where they are not logged or no tokenizer can read them"""
    text: str
    """the completion, shown where there are no pieces"""
    calls: tuple[tuple[str, str], ...]
    """tool and arguments"""
    observations: tuple[Observation, ...]
    problem: str | None
    """why no call could be read"""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A rollout that was chosen, with the run behind it where the log still has it."""

    choice: Choice
    run: Trajectory | None
    missing: str
    """why there is no run"""
    turns: tuple[ShownTurn, ...]


def sample(choice: Choice, log: LogStore | str, decode: Decode | None) -> Sample:
    """The run of a choice; `log` is a sentence where it cannot be read."""
    if isinstance(log, str):
        return Sample(choice=choice, run=None, missing=log, turns=())
    try:
        run = log.get(choice.rollout.id)
    except LogError as problem:
        return Sample(choice=choice, run=None, missing=str(problem), turns=())
    turns = tuple(_turn(turn, decode) for turn in run.turns)
    return Sample(choice=choice, run=run, missing="", turns=turns)


def _turn(turn: Turn, decode: Decode | None) -> ShownTurn:
    tokens = turn.completion.tokens
    return ShownTurn(
        number=turn.index + 1,
        pieces=tuple(pieces(tokens, decode)) if tokens and decode else (),
        text=cut(turn.completion.text),
        calls=tuple((call.name, _arguments(call.arguments)) for call in turn.calls),
        observations=turn.observations,
        problem=turn.parse_error,
        seconds=turn.ended - turn.started,
    )


def _arguments(arguments: dict) -> str:  # type: ignore[type-arg]
    return cut(
        ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in arguments.items())
    )


def cut(text: str) -> str:
    """The head and the tail of a long text, with what was left out between them."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
