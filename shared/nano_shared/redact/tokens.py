"""Token ids under a secret: one placeholder for each, so that nothing behind it moves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from nano_shared.redact.known import Known
from nano_shared.redact.redactor import Redactor
from nano_shared.types import REDACTED_ID, Turn, TurnTokens

Decode = Callable[[Sequence[int]], str]


def masked_positions(ids: Sequence[int], decode: Decode, redactor: Redactor, known: Known) -> set[int]:
    """Positions of a row of ids whose text overlaps a secret.

    Texts of single ids are joined, so that a secret is found across their boundaries. Where a tokenizer
    writes differently in context, the whole stretch in which something is still found is masked.
    """
    texts = {i: "" if i == REDACTED_ID else decode([i]) for i in set(ids)}
    masked = {at for at, i in enumerate(ids) if i == REDACTED_ID}
    while True:
        more = _overlapping(ids, texts, masked, redactor, known)
        for stretch in _stretches(len(ids), masked | more):
            if redactor.find(decode([ids[at] for at in stretch]), known):
                more |= set(stretch)
        if not more:
            return masked
        masked |= more


def _overlapping(
    ids: Sequence[int], texts: dict[int, str], masked: set[int], redactor: Redactor, known: Known
) -> set[int]:
    """Positions not yet masked whose text overlaps a secret; a masked one reads as the end of a line."""
    pieces = ["\n" if at in masked else texts[i] for at, i in enumerate(ids)]
    ends = list(accumulate(map(len, pieces)))
    return {
        at
        for span in redactor.find("".join(pieces), known)
        for at in range(bisect_right(ends, span.start), bisect_left(ends, span.end) + 1)
        if at not in masked
    }


def _stretches(length: int, masked: set[int]) -> Iterable[range]:
    """The longest stretches without a masked position."""
    edges = [-1, *sorted(masked), length]
    return [range(a + 1, b) for a, b in pairwise(edges) if b > a + 1]


def mask_ids(tokens: TurnTokens, masked: Callable[[int], bool]) -> TurnTokens:
    """The same number of ids; where `masked` (of the position in context + sampled) holds, the placeholder,
    and for sampled ones a log-prob of 0, which tells nothing."""
    split = len(tokens.context_ids)
    ids = [
        REDACTED_ID if masked(at) else i for at, i in enumerate((*tokens.context_ids, *tokens.sampled_ids))
    ]
    return tokens.model_copy(
        update={
            "context_ids": tuple(ids[:split]),
            "sampled_ids": tuple(ids[split:]),
            "logprobs": tuple(0.0 if masked(split + at) else p for at, p in enumerate(tokens.logprobs)),
        }
    )


def mask_turns(
    turns: Sequence[Turn], decode: Decode | None, redactor: Redactor, known: Known
) -> tuple[Turn, ...]:
    """The turns with their ids masked, row by row. Without `decode` nobody can say which ids spell the
    secret, so all of them are masked."""
    rows: dict[int, list[int]] = {}
    places: list[tuple[int, int] | None] = []
    for turn in turns:
        tokens = turn.completion.tokens
        if tokens is None:
            places.append(None)
            continue
        row = rows.setdefault(tokens.row, [])
        places.append((tokens.row, len(row)))
        row += (*tokens.context_ids, *tokens.sampled_ids)
    masked = {
        number: set(range(len(ids))) if decode is None else masked_positions(ids, decode, redactor, known)
        for number, ids in rows.items()
    }
    return tuple(
        turn if place is None else _with_tokens(turn, masked[place[0]], place[1])
        for turn, place in zip(turns, places, strict=True)
    )


def _with_tokens(turn: Turn, masked: set[int], begin: int) -> Turn:
    tokens = turn.completion.tokens
    assert tokens is not None
    if not any(begin + at in masked for at in range(len(tokens.context_ids) + len(tokens.sampled_ids))):
        return turn
    changed = mask_ids(tokens, lambda at: begin + at in masked)
    return turn.model_copy(update={"completion": turn.completion.model_copy(update={"tokens": changed})})
