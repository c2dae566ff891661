"""Delta debugging finds what is needed, and a change that leaves no Python is seen."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from test_hunks import tree

from nano_mining.reduction import parses, reduced
from nano_rl.tasks.code_places import hunks_between
from nano_shared.snapshot import MemoryBlobs


def test_a_change_that_leaves_no_python_is_seen() -> None:
    blobs = MemoryBlobs()
    before, after = tree(blobs, a="x = 1\n"), tree(blobs, a="x = 2\n")
    hunks = hunks_between(before, after, ["a.py"], blobs)
    assert parses(after, hunks, blobs)
    assert not parses(tree(blobs, a="def f(:\n"), hunks, blobs)


@given(st.sets(st.integers(0, 40), min_size=1, max_size=4))
def test_what_is_needed_is_found_and_no_more(needed: set[int]) -> None:
    asked = 0

    def holds(some: Sequence[int]) -> bool:
        nonlocal asked
        asked += 1
        return needed <= set(some)

    assert set(reduced(range(41), holds)) == needed
    assert asked < 41 * 6
