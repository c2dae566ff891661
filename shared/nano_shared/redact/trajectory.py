"""Redacts whole runs and other values: every text, and the tokens that spell secrets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from nano_shared.blobs import BlobStore
from nano_shared.errors import LogError
from nano_shared.logged_run import LoggedRun
from nano_shared.policy import DecodeIds
from nano_shared.redact.patterns import Known
from nano_shared.redact.redactor import Redactor
from nano_shared.types import REDACTED_ID, Trajectory, Turn, TurnTokens, Value


def masked_positions(ids: Sequence[int], decode: DecodeIds, redactor: Redactor, known: Known) -> set[int]:
    """Positions of a row of ids whose text overlaps a secret.

    Texts of single ids are joined, so that secrets across their boundaries are found. If a tokenizer writes
    differently in context, a whole stretch in which something is still found is masked.
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
    """Positions, not yet masked, whose text overlaps a secret; masked ones count as line ends."""
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
    """The same number of ids, with the placeholder where `masked(position)` is true (position in context +
    sampled); masked sampled ids get log-prob 0."""
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
    turns: Sequence[Turn], decode: DecodeIds | None, redactor: Redactor, known: Known
) -> tuple[Turn, ...]:
    """The turns with their ids masked, row by row. Without `decode`, it is unknown which ids spell the
    secret, and all are masked."""
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


T = TypeVar("T")
V = TypeVar("V", bound=Value)


def scrub_trajectory(
    trajectory: Trajectory,
    *,
    redactor: Redactor | None = None,
    decode: DecodeIds | None = None,
    blobs: BlobStore | None = None,
) -> Trajectory:
    """The run with a marker for each secret in its texts, and a placeholder for each token of one.

    A secret that is recognised anywhere is hidden everywhere, and so are eight characters of a long one, as
    truncated observations leave them. `decode` gives the text of ids; without it, all ids of a run that holds
    a secret are masked. `blobs` allows reading the full outputs behind truncated observations for secrets;
    they and the snapshots are not changed (see `scrub_blob`, `scrub_snapshot`).
    """
    redactor = redactor or Redactor()
    known = Known()
    learn(trajectory, redactor, known)
    if blobs is not None:
        for text in _outputs(trajectory, blobs):
            known.add(redactor.secrets(text))
    if decode is not None:
        for ids in _rows(trajectory):
            text = "".join("\n" if i == REDACTED_ID else decode([i]) for i in ids)
            known.add(redactor.secrets(text))
    scrubbed = scrub_value(trajectory, redactor, known)
    if decode is None and scrubbed == trajectory:
        return trajectory
    return scrubbed.model_copy(update={"turns": mask_turns(scrubbed.turns, decode, redactor, known)})


def learn(value: object, redactor: Redactor, known: Known) -> None:
    """Add every secret in the texts of a value to `known`."""

    def look(text: str) -> str:
        known.add(redactor.secrets(text))
        return text

    map_texts(value, look)


def scrub_value(value: T, redactor: Redactor, known: Known) -> T:
    """A value with its texts redacted; token ids are left alone."""
    return map_texts(value, lambda text: redactor.scrub(text, known)[0])


def map_texts(value: T, change: Callable[[str], str]) -> T:
    """The value with `change` applied to every text in it, keys of dictionaries included."""
    result: Any = value
    if isinstance(value, Enum | TurnTokens):
        return value
    if isinstance(value, str):
        result = change(value)
    elif isinstance(value, Value):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        changed = {name: map_texts(old, change) for name, old in fields.items()}
        result = value.model_copy(update=changed)
    elif isinstance(value, tuple | list):
        result = type(value)(map_texts(item, change) for item in value)
    elif isinstance(value, dict):
        result = {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    return result  # type: ignore[no-any-return]


def _rows(trajectory: Trajectory) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for turn in trajectory.turns:
        if turn.completion.tokens is not None:
            tokens = turn.completion.tokens
            rows.setdefault(tokens.row, []).extend((*tokens.context_ids, *tokens.sampled_ids))
    return list(rows.values())


def _outputs(trajectory: Trajectory, blobs: BlobStore) -> list[str]:
    texts = []
    for turn in trajectory.turns:
        for observation in turn.observations:
            if observation.blob is not None:
                try:
                    texts.append(blobs.get(observation.blob).decode("utf-8", "replace"))
                except LogError:
                    continue  # the blob is missing, so it is not exported either
    return texts


def redacted_runs(runs: Iterable[LoggedRun], blobs: BlobStore) -> Iterator[LoggedRun]:
    """The runs without secrets, also in verdicts and feedback, and with the tokens of secrets masked."""
    for run in runs:
        texts = redacted(run)
        verdict = texts.verdicts[-1] if texts.verdicts else None
        scrubbed = scrub_trajectory(run.trajectory, blobs=blobs).model_copy(update={"verdict": verdict})
        yield texts.model_copy(update={"trajectory": scrubbed})


def redacted(value: V) -> V:
    """A value with every text in it redacted."""
    redactor, known = Redactor(), Known()
    learn(value, redactor, known)  # a secret that is found anywhere is hidden everywhere
    scrubbed: V = scrub_value(value, redactor, known)
    return scrubbed
