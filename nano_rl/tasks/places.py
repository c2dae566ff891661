"""Places: where in a project a task's change lies, and the part of the split that each belongs to, for ever.

A place is `PATH::FUNCTION`, or `PATH` outside of functions and for what is no Python. The hash of its name
alone decides the part, so that no cycle, order or random generator can move it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterator
from difflib import SequenceMatcher
from enum import StrEnum

from nano_shared import snapshot
from nano_shared.blobs import BlobStore
from nano_shared.process import parse
from nano_shared.snapshot import EntryKind, Snapshot


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
            inside = next((name for name, first, last, _ in functions if first <= line <= last), "")
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
