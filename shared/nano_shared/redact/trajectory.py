"""A whole run without its secrets: every text of it, and the tokens that spell them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from nano_shared.blobs import BlobStore
from nano_shared.errors import LogError
from nano_shared.redact.known import Known
from nano_shared.redact.redactor import Redactor
from nano_shared.redact.tokens import Decode, mask_turns
from nano_shared.types import REDACTED_ID, Trajectory, TurnTokens, Value

T = TypeVar("T")


def scrub_trajectory(
    trajectory: Trajectory,
    *,
    redactor: Redactor | None = None,
    decode: Decode | None = None,
    blobs: BlobStore | None = None,
) -> Trajectory:
    """The run with a marker for each secret in its texts and a placeholder for each token under one.

    A secret that is recognised anywhere is hidden everywhere, and so are eight characters of a long one, as
    a truncated observation leaves them. `decode` gives the text of ids; without it every id of a run that
    holds a secret is masked. `blobs` lets the full outputs behind truncated observations be read for
    secrets; neither they nor snapshots are changed (see `scrub_blob`, `scrub_snapshot`).
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


def is_redacted(trajectory: Trajectory) -> bool:
    """Whether tokens of the run were redacted: what follows them was sampled after something else."""
    return any(REDACTED_ID in ids for ids in _rows(trajectory))


def learn(value: object, redactor: Redactor, known: Known) -> None:
    """Add every secret in the texts of a value to `known`."""

    def look(text: str) -> str:
        known.add(redactor.secrets(text))
        return text

    map_texts(value, look)


def scrub_value(value: T, redactor: Redactor, known: Known) -> T:
    """Any value of ours with its texts scrubbed; token ids are left alone."""
    return map_texts(value, lambda text: redactor.scrub(text, known)[0])


def map_texts(value: T, change: Callable[[str], str]) -> T:
    """The value with `change` applied to every text in it, the keys of dictionaries included."""
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
                    continue  # it is not at hand, so nothing of it is exported either
    return texts
