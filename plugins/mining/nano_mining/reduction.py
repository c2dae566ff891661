"""The smallest part of a change that is needed, by delta debugging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from nano_rl.tasks.code_places import TreeHunk
from nano_shared.process import parse
from nano_shared.snapshot import BlobStore, Snapshot

Element = TypeVar("Element")


def parses(tree: Snapshot, hunks: Iterable[TreeHunk], blobs: BlobStore) -> bool:
    """Whether the Python files that the hunks change can be compiled, as far as their syntax goes."""
    for path in {hunk.path for hunk in hunks if hunk.path.endswith(".py")}:
        entry = tree.by_path.get(path)
        try:
            parse(blobs.get(str(entry.content)) if entry is not None else b"")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def reduced(parts: Sequence[Element], holds: Callable[[Sequence[Element]], bool]) -> list[Element]:
    """A part of `parts` on which `holds` is still true and from which no single one can be left out, by delta
    debugging (Zeller and Hildebrandt 2002). `holds` must be true of all `parts`, and is not asked about them.
    A `holds` that answers False from some time on ends the search with the smallest part found by then."""
    left, number = list(parts), 2
    while len(left) > 1:
        edges = [len(left) * n // number for n in range(number + 1)]
        chunks = [(left[a:b], [*left[:a], *left[b:]]) for a, b in pairwise(edges)]
        if (found := next((some for some, _ in chunks if holds(some)), None)) is not None:
            left, number = found, 2
        elif number > 2 and (found := next((rest for _, rest in chunks if holds(rest)), None)) is not None:
            left, number = found, max(2, number - 1)
        elif number < len(left):
            number = min(len(left), 2 * number)
        else:
            break
    return left
