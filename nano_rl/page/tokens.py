"""Sampled tokens as text again, piece by piece, each with its log-probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nano_shared.types import TurnTokens

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
