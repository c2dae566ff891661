"""Streams of integers: the elements of a list, a range, digits, lengths or pairs, filtered and mapped."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from nano_suites.functions.program import Param, ValueKind

KNOB_NAMES = ("k", "limit", "target", "step", "bound", "cutoff")


@dataclass(frozen=True, slots=True)
class Domain:
    """A parameter whose name is still to be drawn."""

    names: tuple[str, ...]
    kind: ValueKind
    low: int = -9
    high: int = 12
    least: int = 0

    def draw(self, rng: random.Random) -> Param:
        name = rng.choice(self.names)
        return Param(name=name, kind=self.kind, low=self.low, high=self.high, least=self.least)


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


_XS = Domain(("values", "numbers", "items", "xs", "nums", "data", "scores", "samples"), ValueKind.INTS)
_N = Domain(("n", "count", "limit", "size"), ValueKind.INT, 0, 12)
_DIGITS = Domain(("n", "number", "value"), ValueKind.INT, 0, 9999)
_TEXTS = Domain(("words", "names", "parts"), ValueKind.STRS)
_LOW = Domain(("a", "low", "start"), ValueKind.INT, -6, 5)
_HIGH = Domain(("b", "high", "stop"), ValueKind.INT, -2, 14)
_LEFT = Domain(("xs", "left", "first"), ValueKind.INTS, least=1)
_RIGHT = Domain(("ys", "right", "second"), ValueKind.INTS, least=1)
_BEFORE = "between each number and the one before it in {p}"
_MINUS = " (first minus second)"
_PAIRS = "of the numbers at equal positions in {p} and {q}"
SOURCES = {
    # parameters, variable ("" is drawn), what is iterated over, element, noun, where
    "list": ((_XS,), "", "{p}", "", "numbers", "in {p}"),
    "tail": ((_XS,), "", "{p}[1:]", "", "numbers", "in {p} after the first"),
    "init": ((_XS,), "", "{p}[:-1]", "", "numbers", "in {p} before the last"),
    "evens": ((_XS,), "", "{p}[::2]", "", "numbers", "at positions 0, 2, 4 and so on of {p}"),
    "odds": ((_XS,), "", "{p}[1::2]", "", "numbers", "at positions 1, 3, 5 and so on of {p}"),
    "head3": ((_XS,), "", "{p}[:3]", "", "numbers", "among the first three of {p}"),
    "back": ((_XS,), "", "{p}[::-1]", "", "numbers", "in {p} taken from last to first"),
    "upto": ((_N,), "i", "range(1, {p} + 1)", "i", "whole numbers", "from 1 to {p} inclusive"),
    "below": ((_N,), "i", "range({p})", "i", "whole numbers", "from 0 to {p} - 1"),
    "between": ((_LOW, _HIGH), "i", "range({p}, {q} + 1)", "i", "whole numbers", "from {p} to {q} inclusive"),
    "digits": ((_DIGITS,), "d", "str({p})", "int(d)", "digits", "of {p}"),
    "lengths": ((_TEXTS,), "w", "{p}", "len(w)", "lengths", "of the strings in {p}"),
    "steps": ((_XS,), "a, b", "zip({p}, {p}[1:])", "(b - a)", "differences", _BEFORE),
    "sums": ((_XS,), "a, b", "zip({p}, {p}[1:])", "(a + b)", "sums", "of neighbouring numbers in {p}"),
    "products": ((_LEFT, _RIGHT), "a, b", "zip({p}, {q})", "(a * b)", "products", _PAIRS),
    "gaps": ((_LEFT, _RIGHT), "a, b", "zip({p}, {q})", "(a - b)", "differences", _PAIRS + _MINUS),
}  # fmt: skip


def draw_source(rng: random.Random) -> Source:
    key = "list" if rng.random() < 0.45 else rng.choice(list(SOURCES))
    domains, var, iterable, element, noun, where = SOURCES[key]
    params = tuple(domain.draw(rng) for domain in domains)
    var = var or rng.choice(("x", "v", "value", "item", "num"))
    named = {"p": params[0].name, "q": params[-1].name}
    return Source(
        key=key, params=params, var=var, iterable=iterable.format(**named), element=element or var, noun=noun,
        where=where.format(**named), filled=key == "digits",
    )  # fmt: skip


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
    def first_argument(self) -> str:
        """As an argument before others."""
        return self.source.iterable if self.plain else f"({self.clause})"

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
        source=source, element=element, condition=condition, words=words, key=key, name=name,
        params=tuple(params),
    )  # fmt: skip


def atom(code: str) -> str:
    """Code that needs no brackets, or brackets around it."""
    return code if code.isidentifier() or re.fullmatch(r"\w+\([^()]*\)", code) else f"({code})"
