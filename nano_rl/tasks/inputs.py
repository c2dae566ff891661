"""Further inputs for a function that is known by its cases: drawn from between theirs, so of its domain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from nano_shared.hashing import canonical_json
from nano_shared.types import Case


def further_calls(cases: Sequence[Case], rng: random.Random, count: int) -> list[dict[str, Any]]:
    """At most `count` calls ({"args", "kwargs"}) that no case makes, each shaped like one of the cases."""
    shapes = [(len(c.args), tuple(sorted(c.kwargs))) for c in cases]
    seen = {canonical_json([c.args, c.kwargs]) for c in cases}
    found: list[dict[str, Any]] = []
    for _ in range(2 * count):
        if len(found) == count:
            break
        like = rng.choice(cases)
        shape = (len(like.args), tuple(sorted(like.kwargs)))
        kin = [c for c, s in zip(cases, shapes, strict=True) if s == shape]
        args = [_between([c.args[i] for c in kin], rng) for i in range(len(like.args))]
        kwargs = {k: _between([c.kwargs[k] for c in kin], rng) for k in sorted(like.kwargs)}
        key = canonical_json([args, kwargs])
        if key not in seen:
            seen.add(key)
            found.append({"args": args, "kwargs": kwargs})
    return found


def _between(values: Sequence[Any], rng: random.Random) -> Any:
    """A value like the given ones: one of them, or one in their range."""
    one = rng.choice(values)
    same = [v for v in values if type(v) is type(one)]
    if rng.random() < 0.25:
        return one
    if type(one) is int:
        return rng.randint(min(same), max(same))
    if type(one) is str:
        return _text(same, rng)
    if type(one) is list:
        return _list(same, rng)
    return one


def _text(values: Sequence[str], rng: random.Random) -> str:
    """Words of several texts, or a piece of one."""
    if rng.random() < 0.4:
        one = rng.choice(values)
        start = rng.randint(0, len(one))
        return one[start:] if rng.random() < 0.5 else one[: len(one) - start]
    if any(" " in v for v in values):
        words = [w for v in values for w in v.split(" ")]
        return " ".join(
            rng.choice(words) for _ in range(rng.randint(1, max(v.count(" ") for v in values) + 1))
        )
    return rng.choice(values)


def _list(values: Sequence[list[Any]], rng: random.Random) -> list[Any]:
    """Elements of several lists, of a length that occurs; sorted where all of them are."""
    pool = [x for v in values for x in v]
    if not pool:
        return []
    size = rng.randint(min(map(len, values)), max(map(len, values)))
    made = [rng.choice(pool) for _ in range(size)]
    if all(type(x) is int for x in pool):
        if rng.random() < 0.5:
            made = [rng.randint(min(pool), max(pool)) for _ in range(size)]
        if all(v == sorted(v) for v in values):
            made.sort()
    return made
