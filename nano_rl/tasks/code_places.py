"""Places: where in a project a task's change lies, and the part of the split that each belongs to, for ever.
And the hunks of a change between two trees: applied in part, reduced to what is needed, or as tool calls.

A place is `PATH::FUNCTION`, or `PATH` outside of functions and for what is no Python. The hash of its name
alone decides the part, so that no cycle, order or random generator can move it.
"""

from __future__ import annotations

import ast
import hashlib
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

from nano_shared import snapshot
from nano_shared.process import parse
from nano_shared.snapshot import BlobStore, Entry, EntryKind, Snapshot, make_snapshot
from nano_shared.types import OracleAction


class SplitPart(StrEnum):
    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


SHARES = {SplitPart.TRAIN: 0.65, SplitPart.VALIDATION: 0.10, SplitPart.HELD_OUT: 0.25}
_AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def part_of(place: str) -> SplitPart:
    """The part of a place, by the first 64 bits of the SHA-256 of its name."""
    drawn = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8]) / 2**64
    for part, share in SHARES.items():
        drawn -= share
        if drawn < 0:
            return part
    return SplitPart.HELD_OUT


def functions_of(text: str) -> list[tuple[str, int, int, str]]:
    """(qualified name, first line, last line, hash of the normalised code) of the functions and methods of a
    Python text; decorators count as theirs, and nested functions as part of the outer one. Empty for a text
    that is no Python."""
    try:
        return list(_functions(parse(text).body, ""))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int, int, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, _AnyFunction):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            # the code without comments, layout, docstring, decorators and its own name
            code = node.body[1:] if ast.get_docstring(node) is not None else node.body
            shown = ast.dump(node.args) + "".join(map(ast.dump, code))
            hashed = hashlib.sha256(shown.encode()).hexdigest()[:32]
            yield f"{prefix}{node.name}", first, node.end_lineno or node.lineno, hashed


def function_at(line: int, functions: Iterable[tuple[str, int, int, str]]) -> str:
    """The name of that one of `functions_of` that holds a line; empty where none does."""
    return next((name for name, first, last, _ in functions if first <= line <= last), "")


def changed_places(before: Snapshot, after: Snapshot, blobs: BlobStore) -> list[str]:
    """The places that differ between two workspaces, sorted; those of tests too."""
    found: set[str] = set()
    for path in snapshot.changed_paths(before, after):
        old, new = text_of(before, path, blobs), text_of(after, path, blobs)
        if not path.endswith(".py") or old is None or new is None:
            found.add(path)
            continue
        functions = functions_of(new)
        for line in _changed_lines(old, new):
            inside = function_at(line, functions)
            found.add(f"{path}::{inside}" if inside else path)
    return sorted(found)


def _changed_lines(old: str, new: str) -> Iterator[int]:
    """The lines of `new`, from 1, that differ, and one beside each place where lines were taken away."""
    was, now = old.splitlines(), new.splitlines()
    for kind, _, _, first, last in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        if kind == "delete":
            yield min(first + 1, max(len(now), 1))
        elif kind != "equal":
            yield from range(first + 1, last + 1)


def text_of(tree: Snapshot, path: str, blobs: BlobStore) -> str | None:
    """The text of a file; None for what is no text, and for no file."""
    entry = tree.by_path.get(path)
    if entry is None or entry.kind is not EntryKind.FILE:
        return None
    try:
        return blobs.get(str(entry.content)).decode()
    except UnicodeError:
        return None


def codes_of(tree: Snapshot, places: Collection[str], blobs: BlobStore) -> set[str]:
    """The normalised code of these places in a workspace; of functions alone."""
    found: set[str] = set()
    for path in {place.partition("::")[0] for place in places}:
        for name, _, _, code in functions_of(text_of(tree, path, blobs) or ""):
            if f"{path}::{name}" in places:
                found.add(code)
    return found


_NEAR = 3
"""unchanged lines between two hunks that are made by one edit"""
_LARGEST = 400_000
"""characters of a file whose lines are compared"""
Element = TypeVar("Element")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeHunk:
    """Lines of a text file that are replaced, or a whole file that is added, replaced or deleted."""

    path: str
    entry: Entry | None
    """the file after the whole change; None if the change deletes it"""
    first: int | None = None
    """index of the first replaced line; None for a whole file"""
    old: tuple[str, ...] = ()
    """replaced lines, each with its line end"""
    new: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Lines removed and added; a whole file that is deleted or no text counts as one."""
        return max(1, len(self.old) + len(self.new))


def hunks_between(
    before: Snapshot, after: Snapshot, paths: Iterable[str], blobs: BlobStore
) -> list[TreeHunk]:
    """The change of these files, in the order of paths and lines."""
    return [hunk for path in sorted(paths) for hunk in _of_file(path, before, after, blobs)]


def _of_file(path: str, before: Snapshot, after: Snapshot, blobs: BlobStore) -> Iterator[TreeHunk]:
    entry = after.by_path.get(path)
    old, new = (_lines(tree, path, blobs) for tree in (before, after))
    if old is None or new is None or entry is None:
        yield TreeHunk(path=path, entry=entry, new=tuple(new or ()))
        return
    for tag, first, last, start, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            old_lines, new_lines = tuple(old[first:last]), tuple(new[start:end])
            yield TreeHunk(path=path, entry=entry, first=first, old=old_lines, new=new_lines)


def _lines(tree: Snapshot, path: str, blobs: BlobStore) -> list[str] | None:
    """The lines of a text file as `edit_file` counts them (a form feed, for one, ends no line); None for
    anything else."""
    text = text_of(tree, path, blobs)
    if not text or "\0" in text or len(text) > _LARGEST:
        return None
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def applied(before: Snapshot, hunks: Iterable[TreeHunk], blobs: BlobStore) -> Snapshot:
    """The tree with some hunks of one change."""
    kept = dict(before.by_path)
    for path, group in groupby(sorted(hunks, key=attrgetter("path")), attrgetter("path")):
        some = list(group)
        if some[0].first is None:
            kept.pop(path, None)
            if some[0].entry is not None:
                kept[path] = some[0].entry
        else:
            text = "".join(_with(_lines(before, path, blobs) or [], some))
            kept[path] = replace(before.by_path[path], content=blobs.put(text.encode()))
    files = [entry for entry in kept.values() if entry.kind is not EntryKind.DIRECTORY]
    return make_snapshot(files)


def _with(lines: list[str], hunks: Iterable[TreeHunk]) -> list[str]:
    lines = list(lines)
    for hunk in sorted(hunks, key=lambda hunk: hunk.first or 0, reverse=True):
        first = hunk.first or 0
        lines[first : first + len(hunk.old)] = hunk.new
    return lines


def edit_actions(before: Snapshot, hunks: Sequence[TreeHunk], blobs: BlobStore) -> list[OracleAction]:
    """The tool calls that make the change in a workspace that holds `before`: of each edited file first a
    look at it, then its edits from the end to the beginning, so that line numbers stay."""
    actions = []
    for path, group in groupby(hunks, attrgetter("path")):
        some = list(group)
        if some[0].first is not None:
            actions.append(OracleAction(name="read_file", arguments={"path": path}))
            actions += _edits(path, _lines(before, path, blobs) or [], some)
        elif some[0].entry is None:
            actions.append(OracleAction(name="shell", arguments={"command": f"rm {shlex.quote(path)}"}))
        else:
            content = "".join(some[0].new)
            actions.append(OracleAction(name="write_file", arguments={"path": path, "content": content}))
    return actions


def _edits(path: str, lines: list[str], hunks: Sequence[TreeHunk]) -> Iterator[OracleAction]:
    for first, last, new in reversed(list(_joined(lines, hunks))):
        text = "".join(lines)
        if last == first or (last == first + 1 and new):
            at, more = (first, lines[first : first + 1]) if first < len(lines) else (first - 1, [])
            before = lines[at : at + 1] if first >= len(lines) else []
            added = "".join([*before, *new, *(more if last == first else [])])
            yield OracleAction(name="edit_file", arguments={"path": path, "line": at + 1, "new": added})
        else:
            above, below = _unique(text, lines, first, last, bool(new))
            old, kept = "".join(lines[above:below]), [*lines[above:first], *new, *lines[last:below]]
            yield OracleAction(name="edit_file", arguments={"path": path, "old": old, "new": "".join(kept)})
        lines = [*lines[:first], *new, *lines[last:]]


def _joined(lines: list[str], hunks: Sequence[TreeHunk]) -> Iterator[tuple[int, int, list[str]]]:
    """(first, end, new lines) of the edits: hunks that are near each other, together."""
    edits: list[tuple[int, int, list[str]]] = []
    for hunk in hunks:
        first = hunk.first or 0
        if edits and first - edits[-1][1] <= _NEAR:
            begin, end, new = edits.pop()
            edits.append((begin, first + len(hunk.old), [*new, *lines[end:first], *hunk.new]))
        else:
            edits.append((first, first + len(hunk.old), list(hunk.new)))
    return iter(edits)


def _unique(text: str, lines: list[str], first: int, last: int, filled: bool) -> tuple[int, int]:
    """The lines to quote so that what is replaced occurs once, and is not replaced by nothing."""
    while text.count("".join(lines[first:last])) > 1 or not filled:
        if first == 0 and last == len(lines):
            break
        first, last, filled = max(0, first - 1), min(len(lines), last + 1), True
    return first, last
