"""Transcripts for a report page: selected rollouts with the tokens of each turn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from nano_rl.record.training_record import Rollout
from nano_shared.errors import LogError
from nano_shared.policy import DecodeIds
from nano_shared.store import LogStore
from nano_shared.types import Observation, Trajectory, Turn, TurnTokens

CERTAINTIES = (0.9, 0.5, 0.2, 0.05)
"""probabilities that separate the five shades of tokens, descending"""
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of a token, or of several tokens that form one character."""

    text: str
    logprobs: tuple[float, ...]
    """log-prob of each token, nats"""

    @property
    def shade(self) -> int:
        """0 (nearly certain) to 4 (surprising), by the least likely token."""
        probability = math.exp(min(self.logprobs))
        return sum(probability < bound for bound in CERTAINTIES)

    @property
    def told(self) -> str:
        """Log-prob and probability as text."""
        return ", ".join(f"{x:.3f} nats ({math.exp(x):.1%})" for x in self.logprobs)


def load_decoder(path: Path) -> DecodeIds | None:
    """The decoder of a tokenizer.json; None if the file or the library is missing."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(tokens: TurnTokens, decode: DecodeIds) -> Iterator[TokenText]:
    """The sampled tokens in order; their texts, joined, are the text of the completion.

    A token is decoded together with the previous ones, since some tokenizers decode it differently at the
    start, and with the next ones if it ends within a character.
    """
    ids, logprobs = tokens.sampled_ids, tokens.logprobs
    behind, begin = 0, 0
    for end in range(1, len(ids) + 1):
        before = decode(ids[behind:begin])
        text = decode(ids[behind:end])
        if text.endswith(_UNFINISHED) and end < len(ids):
            continue
        yield TokenText(text[len(before) :], logprobs[begin:end])
        behind, begin = begin, end


@dataclass(frozen=True, slots=True)
class ChosenRollout:
    why: str
    step: int
    rollout: Rollout


def choose(steps: Mapping[int, Sequence[Rollout]], *, seed: int = 0) -> list[ChosenRollout]:
    """At most eight different rollouts: best, worst and a random one of the first and of the last step with a
    graded rollout, the last rollout with tampering, and the last passed impossible control.

    Ties are broken by `seed`.
    """
    graded = {
        step: [r for r in runs if r.reward is not None and not r.control] for step, runs in steps.items()
    }
    order = [step for step in sorted(graded) if graded[step]]
    chosen: list[ChosenRollout] = []

    def take(why: str, step: int, runs: Sequence[Rollout], best: bool | None = None) -> None:
        left = [run for run in runs if run.id not in {c.rollout.id for c in chosen}]
        if not left:
            return
        if best is not None:
            wanted = (max if best else min)(run.reward or 0.0 for run in left)
            left = [run for run in left if (run.reward or 0.0) == wanted]
        chosen.append(ChosenRollout(why, step, Random(f"{seed} {why}").choice(left)))

    ends = (
        dict(zip(("beginning", "end"), dict.fromkeys((order[0], order[-1])), strict=False)) if order else {}
    )
    for where, step in ends.items():
        take(f"Best at the {where}", step, graded[step], best=True)
        take(f"Worst at the {where}", step, graded[step], best=False)
        take(f"Random at the {where}", step, graded[step])
    for why, is_hack in (
        ("Tampering was found", lambda r: r.tampered and not r.control),
        ("An impossible control was passed", lambda r: r.control and r.tampered),
    ):
        for step in sorted(steps, reverse=True):
            hacks = [run for run in steps[step] if is_hack(run)]
            if hacks:
                take(why, step, hacks)
                break
    return chosen


LONGEST = 20_000
"""largest number of characters that are shown of one text"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    number: int
    """from 1"""
    pieces: tuple[TokenText, ...]
    """sampled tokens; empty if they were not logged or cannot be decoded"""
    text: str
    """the completion, shown if there are no pieces"""
    calls: tuple[tuple[str, str], ...]
    """tool and arguments"""
    observations: tuple[Observation, ...]
    problem: str | None
    """parse error, if no call could be parsed"""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A selected rollout with its run, if the log has it."""

    choice: ChosenRollout
    run: Trajectory | None
    missing: str
    """reason if there is no run"""
    turns: tuple[ShownTurn, ...]


def sample(choice: ChosenRollout, log: LogStore | str, decode: DecodeIds | None) -> Sample:
    """The run of a selected rollout; `log` is the reason if the log cannot be read."""
    if isinstance(log, str):
        return Sample(choice=choice, run=None, missing=log, turns=())
    try:
        run = log.get(choice.rollout.id)
    except LogError as problem:
        return Sample(choice=choice, run=None, missing=str(problem), turns=())
    turns = tuple(_turn(turn, decode) for turn in run.turns)
    return Sample(choice=choice, run=run, missing="", turns=turns)


def _turn(turn: Turn, decode: DecodeIds | None) -> ShownTurn:
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
    """Shorten a long text to its head and tail."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
