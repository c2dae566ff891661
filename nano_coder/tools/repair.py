"""The tool `edit_line`, and the places of a project that the profile repair-1 shows one after another."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat

from pydantic import BaseModel, ConfigDict

from nano_coder.tools.locate import SECONDS, traced
from nano_coder.tools.shell import execution_result
from nano_coder.tools.text_files import read_text, replace_line, write_data
from nano_coder.tools.tool import ToolContext, ToolFailure, ToolResult, tool
from nano_shared.errors import GivenUp
from nano_shared.printable import terminal_text

NEEDS = "needs a check that the run may see, whose tests in Python fail (--check 'python -m pytest -q')"
_HELD = "places"
_ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}")
ANSWERS = 12
"""of one run, to all places together"""
_LONGEST = 20_000
"""characters of a place; one with more is data rather than code"""
_MOST_LOCATED = 64
_located: dict[str, tuple[RepairPlace, ...]] = {}
_locks: dict[str, threading.Lock] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlace:
    """A part of a file that may hold the bug."""

    path: str
    first: int
    last: int
    likely: tuple[int, ...]
    """numbers of its likeliest lines, the first one first"""
    source: str
    """the lines, each behind its number"""
    failure: str
    """a test that fails and runs it: its lines up to the failure, and the exception"""


class _Places(tuple[RepairPlace, ...]):
    """Held by the tools of one run."""

    __slots__ = ()

    def close(self) -> None:
        pass


def find_places(context: ToolContext, key: str, rounds: int) -> Sequence[RepairPlace]:
    """The place that each turn of a run shows; `edit_line` edits that of its turn.

    A round begins with the likeliest place again, and goes one place further than the round before, until
    there are ANSWERS.
    `key` names the workspace and the check: runs of this process that have one key get the same places.
    Raises GivenUp where nothing can be located.
    """
    return context.held.get(_HELD, lambda: _Places(_in_turn(_once(context, key), rounds)))


def _in_turn(places: Sequence[RepairPlace], rounds: int) -> list[RepairPlace]:
    numbers = chain(range(1, rounds), repeat(rounds))
    return list(islice((place for number in numbers for place in places[:number]), ANSWERS))


def _once(context: ToolContext, key: str) -> tuple[RepairPlace, ...]:
    with _locks.setdefault(key, threading.Lock()):
        if key not in _located:
            for old in list(_located)[: max(0, len(_located) - _MOST_LOCATED)]:
                _located.pop(old, None)
                _locks.pop(old, None)
            _located[key] = _locate(context)
        return _located[key]


def _locate(context: ToolContext) -> tuple[RepairPlace, ...]:
    command = str(context.check)
    try:
        found, _ = traced(context, command)
    except ToolFailure as problem:
        raise GivenUp(f"repair-1 {NEEDS}: {problem}") from None
    if found["exit"] == 0:
        raise GivenUp(f"`{command}` passes: there is nothing to repair")
    if not found["places"]:
        words = terminal_text(found["output"]).strip().splitlines()[-1:]
        why = f"`{command}` ran none of the project's Python under a failing test"
        raise GivenUp(f"repair-1 {NEEDS}; {why}{': ' if words else ''}{''.join(words)}")
    return tuple(
        RepairPlace(
            path=one["path"],
            first=one["first"],
            last=one["last"],
            likely=tuple(one["likely"]),
            source="\n".join(f"{n}|{line}" for n, line in enumerate(one["source"], one["first"])),
            failure=_ADDRESS.sub("", terminal_text(one["failure"])),  # which no other run would have
        )
        for one in found["places"]
        if sum(map(len, one["source"])) < _LONGEST
    )


class LineEdit(BaseModel):
    model_config = ConfigDict(extra="forbid")

    line: int
    text: str


@tool(mutates=True)
def edit_line(context: ToolContext, edits: list[LineEdit]) -> ToolResult:
    """Replace lines of the shown function, and run the check; an edit with which it fails is taken back."""
    place = _shown(context)
    before = read_text(context.jail, place.path)
    texts: dict[int, list[str]] = {}
    for edit in edits:
        if not place.first <= edit.line <= place.last:
            raise ToolFailure(f"line {edit.line} is none of those shown, {place.first} to {place.last}")
        texts.setdefault(edit.line, []).append(edit.text)
    text = before.text
    lines = text.split("\n")
    for line in sorted(texts, reverse=True):
        old = lines[line - 1] if line <= len(lines) else ""
        text = replace_line(place.path, text, line, _indented(texts[line], old))
    if text == before.text:
        raise ToolFailure("nothing changed: the file reads like that already")
    write_data(context.jail, place.path, before.edited(text).data(place.path))
    seconds = max(context.limits.tool_seconds, SECONDS)
    done = execution_result(context.run(["/bin/sh", "-c", str(context.check)], timeout=seconds))
    if done.ok:
        return replace(done, text=f"edited {place.path}; the check passes")
    write_data(context.jail, place.path, before.data(place.path))
    return replace(done, text=f"the check fails, so the edit of {place.path} was taken back\n{done.text}")


def _indented(texts: Sequence[str], old: str) -> str:
    """Lines for an old one; behind its indentation where none has any, which models leave out in quotes."""
    bare = not any(text[:1].isspace() for text in texts)
    indent = old[: len(old) - len(old.lstrip())] if bare else ""
    return "\n".join(f"{indent}{text}" if text else "" for text in texts)


def _shown(context: ToolContext) -> RepairPlace:
    def none() -> _Places:
        raise ToolFailure("no place is shown: edit_line belongs to the profile repair-1")

    places = context.held.get(_HELD, none)
    if context.turn >= len(places):
        raise ToolFailure(f"no place is shown after the {len(places)} turns of the run")
    return places[context.turn]
