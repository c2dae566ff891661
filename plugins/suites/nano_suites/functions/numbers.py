"""Pipelines over integers: a reduction of a stream."""

from __future__ import annotations

import random

from nano_suites.functions.integer_streams import FILTERS, Stream, atom, draw_stream
from nano_suites.functions.program import Program, ValueKind

Reduction = tuple[str, tuple[str, ...], str, ValueKind]
"""words of the reduction, body, name, type of the result"""


def _loop(stream: Stream, result: str, start: str, *steps: str) -> tuple[str, ...]:
    """A loop over the elements that computes `result`; lines of `start` before it."""
    test, pad = ([f"    if {stream.condition}:"], " " * 8) if stream.condition else ([], " " * 4)
    head = f"for {stream.source.var} in {stream.source.iterable}:"
    return (*start.split("\n"), head, *test, *(f"{pad}{step}" for step in steps), f"return {result}")


def _listed(stream: Stream, rng: random.Random, result: str) -> tuple[str, ...]:
    """Keep the stream in a list, then compute `result` over it, or 0 where it holds nothing."""
    name = rng.choice(("kept", "chosen", "found", "picked"))
    empty = () if stream.filled else (f"if not {name}:", "    return 0")
    return (f"{name} = {stream.sequence}", *empty, f"return {result.format(v=name)}")


def _none(stream: Stream) -> str:
    return "" if stream.filled else "; 0 if there are none"


def _sum(stream: Stream, rng: random.Random, key: str) -> Reduction:
    total = rng.choice(("total", "result", "acc"))
    loop = _loop(stream, total, f"{total} = 0", f"{total} += {stream.element}")
    body = rng.choice(((f"return sum({stream.argument})",), loop))
    words = rng.choice(("Return the sum of {m}.", "Add up {m}.", "Compute the total of {m}."))
    return words, body, rng.choice(("sum", "total", "add")), ValueKind.INT


_EXTREMES = {
    "max": (("largest", "greatest"), ("max", "largest", "highest")),
    "min": (("smallest", "least"), ("min", "smallest", "lowest")),
}


def _extreme(stream: Stream, rng: random.Random, key: str) -> Reduction:
    words, names = _EXTREMES[key]
    word = rng.choice(words)
    body: tuple[str, ...] = (f"return {key}({stream.argument})",)
    if not stream.filled:
        body = rng.choice(
            ((f"return {key}({stream.first_argument}, default=0)",), _listed(stream, rng, f"{key}({{v}})"))
        )
    return f"Return the {word} of {{m}}{_none(stream)}.", body, rng.choice(names), ValueKind.INT


def _count(stream: Stream, rng: random.Random, key: str) -> Reduction:
    count = rng.choice(("count", "found", "n_found"))
    tail = f"for {stream.source.var} in {stream.source.iterable} if {stream.condition}"
    body = rng.choice((
        (f"return sum(1 {tail})",), (f"return len([{stream.element} {tail}])",),
        _loop(stream, count, f"{count} = 0", f"{count} += 1"),
    ))  # fmt: skip
    return rng.choice(("Count {m}.", "Return how many there are of {m}.")), body, "count", ValueKind.INT


def _product(stream: Stream, rng: random.Random, key: str) -> Reduction:
    acc = rng.choice(("product", "result", "acc"))
    body = _loop(stream, acc, f"{acc} = 1", f"{acc} *= {stream.element}")
    return "Return the product of {m}; 1 if there are none.", body, "product", ValueKind.INT


_OF_ALL = {
    "mean": ("sum({v}) // len({v})", "mean of {m}, rounded down", ("mean", "average")),
    "spread": ("max({v}) - min({v})", "largest minus the smallest of {m}", ("spread", "range")),
}


def _of_all(stream: Stream, rng: random.Random, key: str) -> Reduction:
    result, words, names = _OF_ALL[key]
    body = _listed(stream, rng, result)
    return f"Return the {words}{_none(stream)}.", body, rng.choice(names), ValueKind.INT


def _end(stream: Stream, rng: random.Random, key: str) -> Reduction:
    body = _listed(stream, rng, "{v}[0]" if key == "first" else "{v}[-1]")
    if key == "first" and not stream.plain and rng.random() < 0.5:
        body = (f"return next(({stream.clause}), 0)",)
        return "Return the first of {m}; 0 if there are none.", body, "first", ValueKind.INT
    return f"Return the {key} of {{m}}{_none(stream)}.", body, key, ValueKind.INT


def _list(stream: Stream, rng: random.Random, key: str) -> Reduction:
    out = rng.choice(("result", "out", "found"))
    loop = _loop(stream, out, f"{out} = []", f"{out}.append({stream.element})")
    body = rng.choice(((f"return [{stream.clause}]",), loop))
    words = rng.choice(("Return a list of {m}.", "List {m}.", "Build the list of {m}."))
    return words, body, rng.choice(("list", "collect", "pick")), ValueKind.INTS


_ORDERS = {
    "ascending": ("sorted({a})", ("from smallest to largest", "in ascending order")),
    "descending": ("sorted({f}, reverse=True)", ("from largest to smallest", "in descending order")),
    "distinct": ("sorted(set({a}))", ("without repetition in ascending order",)),
    "reverse": ("{s}[::-1]", ("in reverse order",)),
}


def _sorted(stream: Stream, rng: random.Random, key: str) -> Reduction:
    code, orders = _ORDERS[key]
    order = rng.choice(orders) if len(orders) > 1 else orders[0]
    code = code.format(a=stream.argument, f=stream.first_argument, s=stream.sequence)
    return f"Return a list of {{m}}; {order}.", (f"return {code}",), key, ValueKind.INTS


def _distinct(stream: Stream, rng: random.Random, key: str) -> Reduction:
    body = (f"return len(set({stream.argument}))",)
    return "Count the distinct values among {m}.", body, key, ValueKind.INT


def _top(stream: Stream, rng: random.Random, key: str) -> Reduction:
    k, word = rng.randint(2, 3), rng.choice(("largest", "smallest"))
    number = {2: "two", 3: "three"}[k]
    piece = f"[-{k}:]" if word == "largest" else f"[:{k}]"
    words = f"Add up the {number} {word} of {{m}} (or all if there are fewer)."
    return words, (f"return sum(sorted({stream.argument}){piece})",), f"sum_{number}_{word}", ValueKind.INT


def _whether(stream: Stream, rng: random.Random, key: str) -> Reduction:
    piece = rng.choice(FILTERS)
    k = str(rng.randint(piece.low, piece.high)) if piece.high else ""
    test = piece.code.format(e=atom(stream.element), k=k)
    tail = f" if {stream.condition}" if stream.condition else ""
    body = (f"return {key}({test} for {stream.source.var} in {stream.source.iterable}{tail})",)
    some = "at least one" if key == "any" else "every one"
    told = piece.words.format(k=k).removeprefix("that are ")
    none = "" if stream.filled or key == "any" else " (True if there are none)"
    return f"Tell whether {some} of {{m}} is {told}{none}.", body, f"{key}_{piece.name}", ValueKind.BOOL


def _running(stream: Stream, rng: random.Random, key: str) -> Reduction:
    body = _loop(stream, "sums", "total = 0\nsums = []", f"total += {stream.element}", "sums.append(total)")
    return "List the running totals of {m}.", body, "running_total", ValueKind.INTS


def _alternating(stream: Stream, rng: random.Random, key: str) -> Reduction:
    step = f"total += sign * {atom(stream.element)}"
    body = _loop(stream, "total", "total = 0\nsign = 1", step, "sign = -sign")
    return "Alternately add and subtract {m}; start from 0 by adding.", body, key, ValueKind.INT


REDUCTIONS = (
    ("sum", _sum), ("sum", _sum), ("max", _extreme), ("min", _extreme), ("count", _count), ("count", _count),
    ("product", _product), ("mean", _of_all), ("spread", _of_all), ("first", _end), ("last", _end),
    ("list", _list), ("list", _list), ("ascending", _sorted), ("descending", _sorted), ("distinct", _sorted),
    ("reverse", _sorted), ("count_distinct", _distinct), ("top", _top), ("any", _whether), ("all", _whether),
    ("running", _running), ("alternating", _alternating),
)  # fmt: skip
_CHANCES = {"count": (0.0, 1.0), "list": (0.7, 0.7)}
"""that a map and a filter take part, where not as usual"""


def draw_numbers(rng: random.Random) -> Program:
    """A pipeline over integers."""
    key, reduction = rng.choice(REDUCTIONS)
    mapped, filtered = _CHANCES.get(key, (0.55, 0.55))
    stream = draw_stream(rng, mapped=mapped, filtered=filtered)
    words, body, name, returns = reduction(stream, rng, key)
    shape = name if key in ("any", "all", "top") else key
    return Program(
        name=f"{name}{stream.name}", params=stream.params, returns=returns, doc=words.format(m=stream.words),
        body=body, family=f"numbers.{shape}({stream.key})", hints=rng.random() < 0.3,
    )  # fmt: skip
