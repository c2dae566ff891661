"""What runs keep and other formats lack: the token triple as deltas, and the rest of a run beside it.

A document with a remainder is read back as the very run it was made of, and refused where its own fields
say something else by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nano_shared.errors import Refused
from nano_shared.logged_run import LoggedRun
from nano_shared.strict_json import Row, refusing_invalid, validated
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


def rollout_details(found: Sequence[Triple]) -> list[dict[str, Any]]:
    """The tokens of a run's turns, as Harbor writes them."""
    names = {"prompt_token_ids": "prompt_ids", "completion_token_ids": "sampled_ids", "logprobs": "logprobs"}
    return [{name: [list(getattr(one, ours)) for one in found] for name, ours in names.items()}]


@dataclass(slots=True)
class TokenRows:
    """Triples back into deltas: a call that extends what was read and sampled before stays in its row."""

    row: int = 0
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """what each row holds"""

    def tokens(self, triple: Triple | None, row: int | None = None) -> TurnTokens | None:
        """The delta of a call; `row` says which row it is of, where that was written down. Raises Refused
        where ids and log-probs differ in number, or the prompt is not what its row holds."""
        if triple is None:
            return None
        if row is None:
            row = self.row if self._extends(triple, self.row) else self.row + 1
        if not self._extends(triple, row):
            raise Refused("prompt_token_ids", f"do not begin with what row {row} holds already")
        with refusing_invalid():
            context = triple.prompt_ids[len(self.rows.get(row, ())) :]
            tokens = TurnTokens(
                row=row, context_ids=context, sampled_ids=triple.sampled_ids, logprobs=triple.logprobs
            )
        self.row, self.rows[row] = row, triple.prompt_ids + triple.sampled_ids
        return tokens

    def _extends(self, triple: Triple, row: int) -> bool:
        held = self.rows.get(row, ())
        return triple.prompt_ids[: len(held)] == held


def triple_of(values: Mapping[str, object], names: tuple[str, str, str], at: str = "") -> Triple | None:
    """A triple out of JSON, `names` being prompt, sampled ids and log-probs: None where any is missing, or
    all are empty. Raises Refused, by `at` and its name, for what is no list of ids, or of log-probs."""
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


FORMAT = 1
"""of the remainder; a program reads the formats up to its own"""


def remainder(run: LoggedRun) -> Row:
    body = run.as_json()
    for turn in body["trajectory"]["turns"]:
        if turn["completion"]["tokens"] is not None:
            turn["completion"]["tokens"] = {"row": turn["completion"]["tokens"]["row"]}
    return {"format": FORMAT, **body}


def restored(body: Any, triples: Iterable[Triple | None], at: str) -> LoggedRun:
    """The run of a remainder and the ids beside it. Raises Refused for one that is newer, or does not fit."""
    if not isinstance(body, dict):
        raise Refused(at, "must be an object")
    refuse_newer(body.get("format"), at)
    body = {key: value for key, value in body.items() if key != "format"}
    trajectory = body.get("trajectory")
    turns = trajectory.get("turns") if isinstance(trajectory, dict) else None
    if not isinstance(trajectory, dict) or not isinstance(turns, list):
        raise Refused(f"{at}.trajectory.turns", "must be a list")
    found = list(triples)
    if len(found) != len(turns):
        raise Refused(at, f"holds {len(turns)} turns, but {len(found)} are written out")
    rows = TokenRows()
    whole = [_with_tokens(turn, triple, rows) for turn, triple in zip(turns, found, strict=True)]
    return validated(LoggedRun, body | {"trajectory": trajectory | {"turns": whole}}, at)


def _with_tokens(turn: Any, triple: Triple | None, rows: TokenRows) -> Any:
    """A turn as it was; one that is malformed is left to the validator."""
    completion = turn.get("completion") if isinstance(turn, dict) else None
    marked = completion.get("tokens") if isinstance(completion, dict) else None
    if not isinstance(completion, dict) or not isinstance(marked, dict):
        return turn
    row = marked.get("row")
    if type(row) is not int:
        raise Refused("completion.tokens.row", f"must be a number, not {row!r:.40}")
    tokens = rows.tokens(triple or Triple((), (), ()), row)
    return turn | {"completion": completion | {"tokens": tokens}}


def refuse_newer(version: object, at: str) -> None:
    if type(version) is not int or version < 1:
        raise Refused(f"{at}.format", f"must be a number from 1, not {version!r:.40}")
    if version > FORMAT:
        why = f"is {version}: a newer nano wrote it, and this one reads up to {FORMAT}; upgrade"
        raise Refused(f"{at}.format", why)


def refuse_edited(given: Row, again: Callable[[], Row], at: str) -> None:
    """Raises Refused where a document's own fields are not what its remainder would be written as."""
    written = again()
    if given != written:
        field = _first_difference(given, written, "")
        raise Refused(field, f"was edited: it differs from `{at}`; remove `{at}` to import the fields alone")


def _first_difference(given: Any, written: Any, path: str) -> str:
    if isinstance(given, dict) and isinstance(written, dict):
        for key in [*given, *written]:
            if key not in given or key not in written:
                return f"{path}.{key}".lstrip(".")
            if given[key] != written[key]:
                return _first_difference(given[key], written[key], f"{path}.{key}".lstrip("."))
    if isinstance(given, list) and isinstance(written, list):
        for number, (one, other) in enumerate(zip(given, written, strict=False)):
            if one != other:
                return _first_difference(one, other, f"{path}.{number}")
    return path
