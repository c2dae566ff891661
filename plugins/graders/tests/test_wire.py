"""Values between two jails keep type, aliases and changes, and nothing with behaviour of its own crosses."""

from __future__ import annotations

import collections
import datetime
import json
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nano_graders.inside.value_codec import MALFORMED, Crossing, NotPlain
from nano_graders.solution_use import used_names

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | st.frozensets(st.integers()) | st.complex_numbers(allow_nan=False) | st.fractions(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner) | st.sets(KEYS),
    max_leaves=20,
)

calm = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def _cross(value: Any) -> Any:
    return Crossing().unpack(json.loads(json.dumps(Crossing().pack(value))))


def _alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, dict):
        return all(map(_alike, a.items(), b.items()))
    return all(map(_alike, a, b)) if isinstance(a, list | tuple) else True


@calm
@given(VALUES)
def test_plain_values_arrive_as_they_were_with_their_types(value: Any) -> None:
    assert _alike(_cross(value), value)


@pytest.mark.parametrize(
    "value",
    [
        10**9000, -(2**70000), True, 1, 1.0, -0.0, float("inf"), range(1, 9, 2), slice(1, None), ..., int,
        bytearray(b"x"), collections.deque([1], 3), collections.Counter("aab"), Decimal("1.50"),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(None, a=1), Fraction(1, 3), datetime.date(2024, 2, 29),
        datetime.timedelta(1, 2, 3), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), "\ud800\u2028",
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_every_kind_that_crosses(value: Any) -> None:
    arrived = _cross(value)
    assert (type(arrived), arrived) == (type(value), value)


class _Spoof(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [_Spoof(3), [_Spoof(3)], object(), {1: (object(),)}, type("T", (), {})])
def test_what_has_behaviour_of_its_own_does_not_cross(value: Any) -> None:
    with pytest.raises(NotPlain):
        Crossing().pack(value)


def test_nesting_has_an_end() -> None:
    deep: list[Any] = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(NotPlain, match="deep"):
        Crossing().pack(deep)


def test_aliases_and_cycles_survive() -> None:
    shared: list[Any] = [1]
    cycle: list[Any] = [shared, shared]
    cycle.append(cycle)
    arrived = _cross(cycle)
    assert arrived[0] is arrived[1]
    assert arrived[2] is arrived


@calm
@given(st.lists(st.lists(st.integers()), min_size=1), st.data())
def test_changes_reach_the_very_object_that_was_passed(rows: list[list[int]], data: st.DataObject) -> None:
    ours, theirs = Crossing(), Crossing()
    inner = list(rows)
    there = theirs.unpack(json.loads(json.dumps(ours.pack(rows))))
    before = theirs.remember()
    there.sort(key=lambda row: (sum(row), row))
    there[0].append(data.draw(st.integers()))
    there.append([7])
    ours.apply(json.loads(json.dumps(theirs.changes(before))))
    assert rows == there
    assert all(any(row is kept for kept in inner) for row in rows[:-1])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("rtdOCNsqBibcDMSTXYFNIfglKVz"), inner, max_size=2)
    ),
    max_leaves=8,
)


@calm
@given(JSON)
def test_nonsense_is_refused_and_never_runs_anything(node: Any) -> None:
    with suppress(*MALFORMED):
        Crossing().unpack(node)


def test_a_star_import_gives_neither_builtins_nor_what_the_tests_define() -> None:
    text = (
        "from sol import *\nimport math\ndef same(a): return all(a)\nassert same([f(x) for x in [math.pi]])\n"
    )
    assert used_names({"t.py": text}, "sol.py") == {"f"}
    text = "import pkg.sol as m\nfrom sol import a as b\nassert m.x == b\n"
    assert used_names({"t.py": text}, "pkg/sol.py") == {"a", "x"}
    assert used_names({"t.txt": ">>> f(1)\n2\n"}, "sol.py") == set()
