"""Pipelines over integers: a reduction of a stream."""

from __future__ import annotations

import random

from nano_suites.functions.integer_streams import FILTERS, Stream, atom, draw_stream
from nano_suites.functions.program import Program, ValueKind


def _loop(stream: Stream, start: str, step: str, result: str) -> tuple[str, ...]:
    lines = [f"{result} = {start}", f"for {stream.source.var} in {stream.source.iterable}:"]
    if stream.condition:
        lines += [f"    if {stream.condition}:", f"        {step}"]
    else:
        lines.append(f"    {step}")
    return (*lines, f"return {result}")


def _listed(stream: Stream, rng: random.Random, empty: str, result: str) -> tuple[str, ...]:
    """Keep the stream in a list, then compute `result` over it, or `empty` where it holds nothing."""
    name = rng.choice(("kept", "chosen", "found", "picked"))
    lines = [f"{name} = {stream.sequence}"]
    if not stream.filled:
        lines += [f"if not {name}:", f"    return {empty}"]
    return (*lines, f"return {result.format(v=name)}")


Reduction = tuple[str, tuple[str, ...], str, ValueKind]
"""words of the reduction, body, name, type of the result"""


def _sum(stream: Stream, rng: random.Random) -> Reduction:
    total = rng.choice(("total", "result", "acc"))
    body = rng.choice(
        ((f"return sum({stream.argument})",), _loop(stream, "0", f"{total} += {stream.element}", total))
    )
    words = rng.choice(("Return the sum of {m}.", "Add up {m}.", "Compute the total of {m}."))
    return words, body, rng.choice(("sum", "total", "add")), ValueKind.INT


def _extreme(stream: Stream, rng: random.Random, which: str) -> Reduction:
    word = rng.choice({"max": ("largest", "greatest"), "min": ("smallest", "least")}[which])
    name = {"max": ("max", "largest", "highest"), "min": ("min", "smallest", "lowest")}[which]
    if stream.filled:
        return (
            f"Return the {word} of {{m}}.",
            (f"return {which}({stream.argument})",),
            rng.choice(name),
            ValueKind.INT,
        )
    argument = stream.source.iterable if stream.plain else f"({stream.clause})"
    body = rng.choice(
        ((f"return {which}({argument}, default=0)",), _listed(stream, rng, "0", f"{which}({{v}})"))
    )
    return f"Return the {word} of {{m}}; 0 if there are none.", body, rng.choice(name), ValueKind.INT


def _count(stream: Stream, rng: random.Random) -> Reduction:
    count = rng.choice(("count", "found", "n_found"))
    var, it = stream.source.var, stream.source.iterable
    body = rng.choice(
        (
            (f"return sum(1 for {var} in {it} if {stream.condition})",),
            (f"return len([{stream.element} for {var} in {it} if {stream.condition}])",),
            _loop(stream, "0", f"{count} += 1", count),
        )
    )
    return rng.choice(("Count {m}.", "Return how many there are of {m}.")), body, "count", ValueKind.INT


def _product(stream: Stream, rng: random.Random) -> Reduction:
    acc = rng.choice(("product", "result", "acc"))
    body = _loop(stream, "1", f"{acc} *= {stream.element}", acc)
    return "Return the product of {m}; 1 if there are none.", body, "product", ValueKind.INT


def _mean(stream: Stream, rng: random.Random) -> Reduction:
    body = _listed(stream, rng, "0", "sum({v}) // len({v})")
    none = "" if stream.filled else "; 0 if there are none"
    return (
        f"Return the mean of {{m}}, rounded down{none}.",
        body,
        rng.choice(("mean", "average")),
        ValueKind.INT,
    )


def _spread(stream: Stream, rng: random.Random) -> Reduction:
    body = _listed(stream, rng, "0", "max({v}) - min({v})")
    none = "" if stream.filled else "; 0 if there are none"
    return (
        f"Return the largest minus the smallest of {{m}}{none}.",
        body,
        rng.choice(("spread", "range")),
        ValueKind.INT,
    )


def _end(stream: Stream, rng: random.Random, which: str) -> Reduction:
    index = "0" if which == "first" else "-1"
    body = _listed(stream, rng, "0", f"{{v}}[{index}]")
    if which == "first" and not stream.plain and rng.random() < 0.5:
        body = (f"return next(({stream.clause}), 0)",)
        return "Return the first of {m}; 0 if there are none.", body, "first", ValueKind.INT
    none = "" if stream.filled else "; 0 if there are none"
    return f"Return the {which} of {{m}}{none}.", body, which, ValueKind.INT


def _list(stream: Stream, rng: random.Random) -> Reduction:
    out = rng.choice(("result", "out", "found"))
    body = rng.choice(
        ((f"return [{stream.clause}]",), _loop(stream, "[]", f"{out}.append({stream.element})", out))
    )
    words = rng.choice(("Return a list of {m}.", "List {m}.", "Build the list of {m}."))
    return words, body, rng.choice(("list", "collect", "pick")), ValueKind.INTS


def _sorted(stream: Stream, rng: random.Random, which: str) -> Reduction:
    if which == "ascending":
        order = rng.choice(("from smallest to largest", "in ascending order"))
        body: tuple[str, ...] = (f"return sorted({stream.argument})",)
    elif which == "descending":
        order = rng.choice(("from largest to smallest", "in descending order"))
        argument = stream.source.iterable if stream.plain else f"({stream.clause})"
        body = (f"return sorted({argument}, reverse=True)",)
    elif which == "distinct":
        order = "without repetition in ascending order"
        body = (f"return sorted(set({stream.argument}))",)
    else:
        order = "in reverse order"
        body = (f"return {stream.sequence}[::-1]",)
    return f"Return a list of {{m}}; {order}.", body, f"{which}", ValueKind.INTS


def _distinct(stream: Stream, rng: random.Random) -> Reduction:
    body = (f"return len(set({stream.argument}))",)
    return "Count the distinct values among {m}.", body, "count_distinct", ValueKind.INT


def _top(stream: Stream, rng: random.Random, which: str) -> Reduction:
    k = rng.randint(2, 3)
    number = {2: "two", 3: "three"}[k]
    word = rng.choice(("largest", "smallest"))
    piece = f"[-{k}:]" if word == "largest" else f"[:{k}]"
    body = (f"return sum(sorted({stream.argument}){piece})",)
    return (
        f"Add up the {number} {word} of {{m}} (or all if there are fewer).",
        body,
        f"sum_{number}_{word}",
        ValueKind.INT,
    )


def _whether(stream: Stream, rng: random.Random, which: str) -> Reduction:
    piece = rng.choice(FILTERS)
    k = str(rng.randint(piece.low, piece.high)) if piece.high else ""
    element = atom(stream.element)
    tail = f" if {stream.condition}" if stream.condition else ""
    test = piece.code.format(e=element, k=k)
    body = (f"return {which}({test} for {stream.source.var} in {stream.source.iterable}{tail})",)
    some = "at least one" if which == "any" else "every one"
    told = piece.words.format(k=k)
    told = told.replace("that are ", "") if told.startswith("that are") else told
    none = "" if stream.filled or which == "any" else " (True if there are none)"
    return f"Tell whether {some} of {{m}} is {told}{none}.", body, f"{which}_{piece.name}", ValueKind.BOOL


def _running(stream: Stream, rng: random.Random) -> Reduction:
    body = _stepped(stream, ("total = 0", "sums = []"), "total += {e}", "sums.append(total)", "sums")
    return "List the running totals of {m}.", body, "running_total", ValueKind.INTS


def _alternating(stream: Stream, rng: random.Random) -> Reduction:
    body = _stepped(stream, ("total = 0", "sign = 1"), "total += sign * {a}", "sign = -sign", "total")
    return "Alternately add and subtract {m}; start from 0 by adding.", body, "alternating", ValueKind.INT


def _stepped(stream: Stream, start: tuple[str, str], one: str, other: str, result: str) -> tuple[str, ...]:
    """A loop of two statements over the elements: `{e}` in the first, `{a}` where it needs brackets."""
    first = one.format(e=stream.element, a=atom(stream.element))
    pad = "        " if stream.condition else "    "
    test = [f"    if {stream.condition}:"] if stream.condition else []
    loop = f"for {stream.source.var} in {stream.source.iterable}:"
    return (*start, loop, *test, f"{pad}{first}", f"{pad}{other}", f"return {result}")


_REDUCTIONS = """
sum sum max min count count product mean spread first last list list ascending descending distinct reverse
count_distinct top any all running alternating
"""
REDUCTIONS = tuple(_REDUCTIONS.split())


def _reduce(stream: Stream, rng: random.Random, key: str) -> Reduction:
    if key in ("max", "min"):
        return _extreme(stream, rng, key)
    if key in ("first", "last"):
        return _end(stream, rng, key)
    if key in ("ascending", "descending", "distinct", "reverse"):
        return _sorted(stream, rng, key)
    if key in ("any", "all"):
        return _whether(stream, rng, key)
    if key == "top":
        return _top(stream, rng, key)
    plain = {
        "sum": _sum,
        "count": _count,
        "product": _product,
        "mean": _mean,
        "spread": _spread,
        "list": _list,
        "count_distinct": _distinct,
        "running": _running,
        "alternating": _alternating,
    }
    return plain[key](stream, rng)


def draw_numbers(rng: random.Random) -> Program:
    """A pipeline over integers."""
    key = rng.choice(REDUCTIONS)
    if key == "count":
        stream = draw_stream(rng, mapped=0.0, filtered=1.0)
    elif key == "list":
        stream = draw_stream(rng, mapped=0.7, filtered=0.7)
    else:
        stream = draw_stream(rng)
    words, body, name, returns = _reduce(stream, rng, key)
    shape = f"{name}" if key in ("any", "all", "top") else key
    return Program(
        name=f"{name}{stream.name}",
        params=stream.params,
        returns=returns,
        doc=words.format(m=stream.words),
        body=body,
        family=f"numbers.{shape}({stream.key})",
        hints=rng.random() < 0.3,
    )
