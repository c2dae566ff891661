"""The token triple of the field, a whole prompt with each completion, and the deltas that a run keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nano_shared.refusal import Refused
from nano_shared.strict_json import refusing_invalid
from nano_shared.types import Trajectory, TurnTokens


@dataclass(frozen=True, slots=True)
class Triple:
    """What the model read and sampled in one call."""

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def triples(run: Trajectory) -> Iterator[Triple | None]:
    """One for each turn, None for a turn without tokens."""
    rows: dict[int, list[int]] = {}
    for turn in run.turns:
        tokens = turn.completion.tokens
        if tokens is None:
            yield None
            continue
        held = rows.setdefault(tokens.row, [])
        held += tokens.context_ids
        yield Triple(tuple(held), tokens.sampled_ids, tokens.logprobs)
        held += tokens.sampled_ids


@dataclass(slots=True)
class TokenRows:
    """Triples back into deltas: a call that extends what was read and sampled before stays in its row."""

    row: int = 0
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """what each row holds"""

    def tokens(self, triple: Triple | None, row: int | None = None) -> TurnTokens | None:
        """The delta of a call; `row` says which row it is of, where that was written down.

        Raises Refused where ids and log-probs differ in number, or the prompt is not what its row holds.
        """
        if triple is None:
            return None
        if row is None:
            row = self.row if self._extends(triple, self.row) else self.row + 1
        if not self._extends(triple, row):
            raise Refused("prompt_token_ids", f"do not begin with what row {row} holds already")
        with refusing_invalid():
            tokens = TurnTokens(
                row=row,
                context_ids=triple.prompt_ids[len(self.rows.get(row, ())) :],
                sampled_ids=triple.sampled_ids,
                logprobs=triple.logprobs,
            )
        self.row, self.rows[row] = row, triple.prompt_ids + triple.sampled_ids
        return tokens

    def _extends(self, triple: Triple, row: int) -> bool:
        held = self.rows.get(row, ())
        return triple.prompt_ids[: len(held)] == held


def triple_of(values: Mapping[str, object], names: tuple[str, str, str], at: str = "") -> Triple | None:
    """A triple out of JSON, `names` being prompt, sampled ids and log-probs: None where any is missing, or
    all are empty.

    Raises Refused, by `at` and its name, for what is no list of ids, or of log-probs.
    """
    prompt, sampled, logprobs = (values.get(name) for name in names)
    first, second, third = (at + name for name in names)
    if prompt is None or sampled is None or logprobs is None or not (prompt or sampled):
        return None
    if len(_list(second, sampled)) != len(_list(third, logprobs)):
        raise Refused(third, "differ in number from the ids that were sampled")
    return Triple(_ids(first, prompt), _ids(second, sampled), _numbers(third, logprobs))


def _list(name: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise Refused(name, "must be a list")
    return value


def _ids(name: str, value: object) -> tuple[int, ...]:
    ids = tuple(item for item in _list(name, value) if type(item) is int and 0 <= item < 2**32)
    if len(ids) != len(_list(name, value)):
        raise Refused(name, "must hold token ids, from 0 to 2^32 - 1")
    return ids


def _numbers(name: str, value: object) -> tuple[float, ...]:
    numbers = tuple(float(item) for item in _list(name, value) if type(item) in (int, float))  # type: ignore[arg-type]
    if len(numbers) != len(_list(name, value)) or any(not x <= 1e-6 for x in numbers):
        raise Refused(name, "must hold log-probs, which are at most 0")
    return numbers
