"""Streams of integers: the elements of a list, a range, digits, lengths or pairs, filtered and mapped."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from nano_suites.functions.program import Param, ValueKind

LIST_NAMES = ("values", "numbers", "items", "xs", "nums", "data", "scores", "samples")
COUNT_NAMES = ("n", "count", "limit", "size")
KNOB_NAMES = ("k", "limit", "target", "step", "bound", "cutoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where integers come from: `for var in iterable`, each giving `element`."""

    key: str
    params: tuple[Param, ...]
    var: str
    iterable: str
    element: str
    noun: str
    where: str
    filled: bool = False
    """never empty"""

    @property
    def bare(self) -> str:
        """The element where it stands alone, without its brackets."""
        return self.element[1:-1] if self.element.startswith("(") else self.element


@dataclass(frozen=True, slots=True)
class Piece:
    """A map or a filter: key, code over `{e}` (and `{k}`), words, and a short name."""

    key: str
    code: str
    words: str
    name: str
    low: int = 0
    high: int = 0
    """range of the constant; 0, 0: none"""


MAPS = (
    Piece("square", "{e} * {e}", "each squared", "squares"),
    Piece("cube", "{e} ** 3", "each cubed", "cubes"),
    Piece("times", "{e} * {k}", "each multiplied by {k}", "times", 2, 9),
    Piece("plus", "{e} + {k}", "each increased by {k}", "plus", 1, 9),
    Piece("minus", "{e} - {k}", "each decreased by {k}", "minus", 1, 9),
    Piece("from", "{k} - {e}", "each subtracted from {k}", "complements", 1, 12),
    Piece("floordiv", "{e} // {k}", "each divided by {k} and rounded down", "quotients", 2, 5),
    Piece("mod", "{e} % {k}", "each replaced by its remainder modulo {k}", "remainders", 2, 6),
    Piece("abs", "abs({e})", "each replaced by its absolute value", "magnitudes"),
    Piece("neg", "-{e}", "each negated", "negated"),
    Piece("cap", "min({e}, {k})", "each capped at {k}", "capped", 1, 8),
    Piece("floor", "max({e}, {k})", "each raised to at least {k}", "floored", 1, 5),
    Piece("distance", "abs({e} - {k})", "each replaced by its distance from {k}", "distances", 1, 9),
    Piece("affine", "{e} * 2 + {k}", "each doubled and then increased by {k}", "doubled_plus", 1, 9),
)
FILTERS = (
    Piece("even", "{e} % 2 == 0", "that are even", "even"),
    Piece("odd", "{e} % 2 == 1", "that are odd", "odd"),
    Piece("positive", "{e} > 0", "that are positive", "positive"),
    Piece("negative", "{e} < 0", "that are negative", "negative"),
    Piece("nonzero", "{e} != 0", "that are not zero", "nonzero"),
    Piece("gt", "{e} > {k}", "greater than {k}", "above", 1, 8),
    Piece("lt", "{e} < {k}", "less than {k}", "below", 1, 8),
    Piece("ge", "{e} >= {k}", "that are at least {k}", "at_least", 1, 8),
    Piece("le", "{e} <= {k}", "that are at most {k}", "at_most", 1, 8),
    Piece("ne", "{e} != {k}", "different from {k}", "except", 1, 8),
    Piece("divisible", "{e} % {k} == 0", "divisible by {k}", "multiples", 3, 5),
    Piece("indivisible", "{e} % {k} != 0", "not divisible by {k}", "non_multiples", 3, 5),
    Piece("within", "-{k} <= {e} <= {k}", "between -{k} and {k} inclusive", "within", 3, 8),
)


def _list_param(rng: random.Random, *, least: int = 0) -> Param:
    return Param(name=rng.choice(LIST_NAMES), kind=ValueKind.INTS, least=least)


def _list_source(rng: random.Random, key: str, iterable: str, where: str) -> Source:
    xs = _list_param(rng)
    var = rng.choice(("x", "v", "value", "item", "num"))
    return Source(
        key=key,
        params=(xs,),
        var=var,
        iterable=iterable.format(p=xs.name),
        element=var,
        noun="numbers",
        where=where.format(p=xs.name),
    )


def _range_source(rng: random.Random, key: str) -> Source:
    if key == "between":
        params = (
            Param(name=rng.choice(("a", "low", "start")), kind=ValueKind.INT, low=-6, high=5),
            Param(name=rng.choice(("b", "high", "stop")), kind=ValueKind.INT, low=-2, high=14),
        )
        a, b = params[0].name, params[1].name
        return Source(
            key=key,
            params=params,
            var="i",
            iterable=f"range({a}, {b} + 1)",
            element="i",
            noun="whole numbers",
            where=f"from {a} to {b} inclusive",
        )
    n = Param(name=rng.choice(COUNT_NAMES), kind=ValueKind.INT, low=0, high=12)
    bounds, where = (
        ("1, {n} + 1", "from 1 to {n} inclusive") if key == "upto" else ("{n}", "from 0 to {n} - 1")
    )
    return Source(
        key=key,
        params=(n,),
        var="i",
        iterable=f"range({bounds.format(n=n.name)})",
        element="i",
        noun="whole numbers",
        where=where.format(n=n.name),
    )


def _derived_source(rng: random.Random, key: str) -> Source:
    if key == "digits":
        n = Param(name=rng.choice(("n", "number", "value")), kind=ValueKind.INT, low=0, high=9999)
        return Source(
            key=key,
            params=(n,),
            var="d",
            iterable=f"str({n.name})",
            element="int(d)",
            noun="digits",
            where=f"of {n.name}",
            filled=True,
        )
    if key == "lengths":
        words = Param(name=rng.choice(("words", "names", "parts")), kind=ValueKind.STRS)
        return Source(
            key=key,
            params=(words,),
            var="w",
            iterable=words.name,
            element="len(w)",
            noun="lengths",
            where=f"of the strings in {words.name}",
        )
    if key in ("steps", "sums"):
        xs = _list_param(rng)
        element = "(b - a)" if key == "steps" else "(a + b)"
        where = (
            "between each number and the one before it in" if key == "steps" else "of neighbouring numbers in"
        )
        return Source(
            key=key,
            params=(xs,),
            var="a, b",
            iterable=f"zip({xs.name}, {xs.name}[1:])",
            element=element,
            noun="differences" if key == "steps" else "sums",
            where=f"{where} {xs.name}",
        )
    first = Param(name=rng.choice(("xs", "left", "first")), kind=ValueKind.INTS, least=1)
    second = Param(name=rng.choice(("ys", "right", "second")), kind=ValueKind.INTS, least=1)
    element, noun = {"products": ("(a * b)", "products"), "gaps": ("(a - b)", "differences")}[key]
    tail = "" if key == "products" else " (first minus second)"
    return Source(
        key=key,
        params=(first, second),
        var="a, b",
        iterable=f"zip({first.name}, {second.name})",
        element=element,
        noun=noun,
        where=f"of the numbers at equal positions in {first.name} and {second.name}{tail}",
    )


_LISTS = {
    "list": ("{p}", "in {p}"),
    "tail": ("{p}[1:]", "in {p} after the first"),
    "init": ("{p}[:-1]", "in {p} before the last"),
    "evens": ("{p}[::2]", "at positions 0, 2, 4 and so on of {p}"),
    "odds": ("{p}[1::2]", "at positions 1, 3, 5 and so on of {p}"),
    "head3": ("{p}[:3]", "among the first three of {p}"),
    "back": ("{p}[::-1]", "in {p} taken from last to first"),
}


def draw_source(rng: random.Random) -> Source:
    if rng.random() < 0.45:
        key = "list"
    else:
        key = rng.choice(
            (*_LISTS, "upto", "below", "between", "digits", "lengths", "steps", "sums", "products", "gaps")
        )
    if key in _LISTS:
        return _list_source(rng, key, *_LISTS[key])
    if key in ("upto", "below", "between"):
        return _range_source(rng, key)
    return _derived_source(rng, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A source with its filter and map applied."""

    source: Source
    element: str
    condition: str
    words: str
    key: str
    name: str
    params: tuple[Param, ...]

    @property
    def plain(self) -> bool:
        return not self.condition and self.element == self.source.var

    @property
    def filled(self) -> bool:
        return self.source.filled and not self.condition

    @property
    def clause(self) -> str:
        tail = f" if {self.condition}" if self.condition else ""
        return f"{self.element} for {self.source.var} in {self.source.iterable}{tail}"

    @property
    def argument(self) -> str:
        """As the only argument of a call that takes an iterable."""
        return self.source.iterable if self.plain else self.clause

    @property
    def sequence(self) -> str:
        """As a list."""
        if self.plain and not self.source.iterable.startswith("range"):
            return self.source.iterable
        return f"[{self.clause}]"


def _constant(piece: Piece, rng: random.Random, params: list[Param]) -> tuple[str, str]:
    """The piece's constant, written as a number or as a further parameter; and how it enters the key."""
    if not piece.high:
        return "", ""
    taken = {p.name for p in params}
    if len(params) == 1 and rng.random() < 0.25:
        name = rng.choice([n for n in KNOB_NAMES if n not in taken])
        params.append(Param(name=name, kind=ValueKind.INT, low=piece.low, high=piece.high))
        return name, ".p"
    return str(rng.randint(piece.low, piece.high)), ""


def draw_stream(rng: random.Random, *, mapped: float = 0.55, filtered: float = 0.55) -> Stream:
    """`mapped` and `filtered` are the chances that a map and a filter take part."""
    source = draw_source(rng)
    params = list(source.params)
    element, condition, key = source.bare, "", source.key
    words, name = f"the {source.noun} {source.where}", "" if source.key == "list" else f"_{source.key}"
    if rng.random() < filtered:
        piece = rng.choice(FILTERS)
        constant, mark = _constant(piece, rng, params)
        operand = source.bare if piece.code.startswith(("{e} >", "{e} <", "{e} !=")) else source.element
        condition = piece.code.format(e=operand, k=constant)
        only = "" if source.key in ("list", "upto", "below", "between", "digits") else ", keeping only those"
        words += f"{only} {piece.words.format(k=constant)}"
        key, name = f"{key}.{piece.key}{mark}", f"{name}_{piece.name}"
    if rng.random() < mapped:
        piece = rng.choice(MAPS)
        constant, mark = _constant(piece, rng, params)
        element = piece.code.format(e=source.element, k=constant)
        if piece.key == "square" and rng.random() < 0.5:
            words = f"the squares of {words}"
        else:
            words += f", {piece.words.format(k=constant)}"
        key, name = f"{key}.{piece.key}{mark}", f"{name}_{piece.name}"
    return Stream(
        source=source,
        element=element,
        condition=condition,
        words=words,
        key=key,
        name=name,
        params=tuple(params),
    )


def atom(code: str) -> str:
    """Code that needs no brackets, or brackets around it."""
    return code if code.isidentifier() or re.fullmatch(r"\w+\([^()]*\)", code) else f"({code})"
