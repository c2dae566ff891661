"""A logged run as a page shows it: what was asked, each turn with its tokens, and the verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from nano_rl.record.rollouts import Rollout
from nano_shared.errors import LogError
from nano_shared.store import LogStore
from nano_shared.types import Observation, Trajectory, Turn, TurnTokens

Decode = Callable[[Sequence[int]], str]
"""ids -> text, special tokens included"""
CERTAINTIES = (0.9, 0.5, 0.2, 0.05)
"""probabilities that part the five shades, the most certain first"""
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of a token, or of the few tokens that make one character."""

    text: str
    logprobs: tuple[float, ...]
    """nats, of each token"""

    @property
    def shade(self) -> int:
        """0 for a token that was nearly certain, up to 4 for a surprise; of the least likely token."""
        probability = math.exp(min(self.logprobs))
        return sum(probability < bound for bound in CERTAINTIES)

    @property
    def told(self) -> str:
        """Log-probability and probability in words."""
        return ", ".join(f"{x:.3f} nats ({math.exp(x):.1%})" for x in self.logprobs)


def load_decoder(path: Path) -> Decode | None:
    """The decoder of a tokenizer.json; None where there is none, or nothing here can read it."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(tokens: TurnTokens, decode: Decode) -> Iterator[Piece]:
    """The sampled tokens in order; their texts, joined, are the text of all of them.

    A token is decoded behind the ones before it, since some tokenizers write it differently at the start, and
    together with the next ones as long as it ends in the middle of a character.
    """
    ids, logprobs = tokens.sampled_ids, tokens.logprobs
    behind, begin = 0, 0
    for end in range(1, len(ids) + 1):
        before = decode(ids[behind:begin])
        text = decode(ids[behind:end])
        if text.endswith(_UNFINISHED) and end < len(ids):
            continue
        yield Piece(text[len(before) :], logprobs[begin:end])
        behind, begin = begin, end


@dataclass(frozen=True, slots=True)
class Choice:
    why: str
    step: int
    rollout: Rollout


def choose(steps: Mapping[int, Sequence[Rollout]], *, seed: int = 0) -> list[Choice]:
    """At most eight rollouts, none twice: three of the first step, three of the last, and hacks if there are.

    Of equally good ones the seed chooses. Beginning and end are the first and the last step that has a graded
    rollout; a training of one step has no end of its own. The hacks are the last rollout in which tampering
    was found, and the last impossible control that was passed.
    """
    graded = {
        step: [r for r in runs if r.reward is not None and not r.control] for step, runs in steps.items()
    }
    order = [step for step in sorted(graded) if graded[step]]
    chosen: list[Choice] = []

    def take(why: str, step: int, runs: Sequence[Rollout], best: bool | None = None) -> None:
        left = [run for run in runs if run.id not in {c.rollout.id for c in chosen}]
        if not left:
            return
        if best is not None:
            wanted = (max if best else min)(run.reward or 0.0 for run in left)
            left = [run for run in left if (run.reward or 0.0) == wanted]
        chosen.append(Choice(why, step, Random(f"{seed} {why}").choice(left)))

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
