"""What other formats have no field for: the run without its ids and log-probs, carried beside them.

A document with a remainder is read back as the very run it was made of, and refused where its own fields
say something else by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nano_coder.formats.token_triple import TokenRows, Triple
from nano_shared.logged_run import LoggedRun
from nano_shared.refusal import Refused
from nano_shared.strict_json import Row, validated

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
        raise Refused(
            f"{at}.format", f"is {version}: a newer nano wrote it, and this one reads up to {FORMAT}; upgrade"
        )


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
