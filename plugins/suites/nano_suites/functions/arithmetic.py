"""Functions of one to three integers: arithmetic, conditions, branches and tests."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from nano_suites.functions.program import Param, Program, ValueKind

NAME_SETS = (
    ("a", "b", "c"), ("x", "y", "z"), ("n", "m", "k"), ("first", "second", "third"),
    ("left", "right", "offset"), ("width", "height", "depth"), ("price", "amount", "fee"),
)  # fmt: skip


_FOLDABLE = re.compile(
    r"\b\d+ (?:[-+*%]|//) \d+\b|\((\d+), \d+\)|\b(\w+) - \2\b|\((\w+), \3\)|abs\(\d|\b\d+ \* \d+"
)
"""an operation on two numbers, or a value minus itself: nobody writes it"""


@dataclass(frozen=True, slots=True)
class Term:
    """An integer expression: code, words, shape; `atom` is a name or a literal."""

    code: str
    words: str
    shape: str
    atom: bool = False
    name: str = ""
    call: bool = False
    """one call: needs no brackets inside another expression"""

    @property
    def inner(self) -> str:
        return self.code if self.atom or self.call else f"({self.code})"

    @property
    def told(self) -> str:
        """The words where others follow: brackets keep them apart."""
        return self.words if self.atom else f"({self.words})"


BINARY = {
    # code, formal and casual words, name
    "add": ("{a} + {b}", "the sum of {A} and {B}", "{A} plus {B}", "sum"),
    "sub": ("{a} - {b}", "the difference {A} minus {B}", "{A} minus {B}", "difference"),
    "mul": ("{a} * {b}", "the product of {A} and {B}", "{A} times {B}", "product"),
    "floordiv": ("{a} // {b}", "the quotient of {A} divided by {B} rounded down",
                 "{A} divided by {B}, rounded down", "quotient"),
    "mod": ("{a} % {b}", "the remainder of {A} divided by {B}", "{A} modulo {B}", "remainder"),
    "min": ("min({a0}, {b0})", "the smaller of {A} and {B}", "the minimum of {A} and {B}", "smaller"),
    "max": ("max({a0}, {b0})", "the larger of {A} and {B}", "the maximum of {A} and {B}", "larger"),
}  # fmt: skip


def binary(op: str, left: Term, right: Term, rng: random.Random) -> Term:
    code, formal, casual, name = BINARY[op]
    words = formal if rng.random() < 0.6 else casual
    code = code.format(a=left.inner, b=right.inner, a0=left.code, b0=right.code)
    words, shape = words.format(A=left.told, B=right.told), f"{op}({left.shape},{right.shape})"
    return Term(code, words, shape, name=name, call=op in ("min", "max"))


def unary(op: str, term: Term) -> Term:
    if op == "abs":
        words = f"the absolute value of {term.told}"
        return Term(f"abs({term.code})", words, f"abs({term.shape})", name="absolute", call=True)
    code = f"{term.inner} * {term.inner}" if term.atom else f"{term.inner} ** 2"
    return Term(code, f"the square of {term.told}", f"square({term.shape})", name="square")


def parameter(name: str, index: int) -> Term:
    return Term(name, name, f"p{index}", atom=True, name=name)


def constant(rng: random.Random, low: int = 2, high: int = 9) -> Term:
    value = rng.randint(low, high)
    return Term(str(value), str(value), "k", atom=True, name=str(value))


def draw_term(rng: random.Random, atoms: list[Term], size: int) -> Term:
    """An expression with `size` operators that uses the atoms in turn."""
    if size == 0:
        return atoms.pop(0) if atoms else constant(rng)
    if rng.random() < 0.15:
        return unary(rng.choice(("abs", "square")), draw_term(rng, atoms, size - 1))
    op = rng.choice(("add", "add", "sub", "sub", "mul", "mul", "floordiv", "mod", "min", "max"))
    left = draw_term(rng, atoms, rng.randint(0, size - 1) if op not in ("floordiv", "mod") else size - 1)
    if op in ("floordiv", "mod"):
        return binary(op, left, constant(rng, 2, 6), rng)
    rest = size - 1 - left.code.count(" ") // 2
    return binary(op, left, draw_term(rng, atoms, max(0, min(rest, size - 1))), rng)


CONDITIONS = {
    "gt": ("{a} > {b}", "{A} is greater than {B}"), "lt": ("{a} < {b}", "{A} is less than {B}"),
    "ge": ("{a} >= {b}", "{A} is at least {B}"), "le": ("{a} <= {b}", "{A} is at most {B}"),
    "eq": ("{a} == {b}", "{A} equals {B}"), "ne": ("{a} != {b}", "{A} differs from {B}"),
    "even": ("{a} % 2 == 0", "{A} is even"), "odd": ("{a} % 2 == 1", "{A} is odd"),
    "positive": ("{a} > 0", "{A} is positive"), "negative": ("{a} < 0", "{A} is negative"),
    "divisible": ("{a} % {k} == 0", "{A} is divisible by {k}"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Test:
    code: str
    words: str
    shape: str
    name: str


def draw_test(rng: random.Random, atoms: list[Term]) -> Test:
    """A comparison over the atoms; a second atom is the other side, else a constant."""
    key = rng.choice(list(CONDITIONS))
    code, words = CONDITIONS[key]
    left = rng.choice(atoms)
    if rng.random() < 0.3:
        others = [t for t in atoms if t is not left]
        other = rng.choice(others) if others else constant(rng, 1, 6)
        left = binary(rng.choice(("add", "sub", "mul")), left, other, rng)
    rest = [t for t in atoms if t.code not in left.code]
    right = rng.choice(rest) if rest and rng.random() < 0.6 else constant(rng, 1, 8)
    k = rng.randint(3, 5)
    shape = f"{key}({left.shape}" + (f",{right.shape})" if "{b}" in code else ")")
    code = code.format(a=left.code if left.atom or "%" not in code else left.inner, b=right.code, k=k)
    return Test(code, words.format(A=left.told, B=right.told, k=k), shape, key)


def _params(rng: random.Random, count: int) -> tuple[tuple[Param, ...], list[Term]]:
    names = rng.choice(NAME_SETS)[:count]
    params = tuple(Param(name=n, kind=ValueKind.INT) for n in names)
    return params, [parameter(n, i) for i, n in enumerate(names)]


def _used(atoms: list[Term], code: str) -> bool:
    return all(re.search(rf"\b{a.code}\b", code) for a in atoms)


_TITLES = "{}_of_numbers compute_{} get_{} {}_value {}_formula combine calculate evaluate"


def draw_expression(rng: random.Random) -> Program:
    """`return` of one arithmetic expression over every parameter, in one or two lines."""
    while True:
        params, atoms = _params(rng, rng.choice((1, 2, 2, 3)))
        spare = list(atoms)
        if rng.random() < 0.5:
            spare.insert(rng.randint(0, len(spare)), rng.choice((*atoms, constant(rng))))
        term = draw_term(rng, spare, rng.choice((1, 2, 2, 3)))
        if _used(atoms, term.code) and not term.atom and not _FOLDABLE.search(term.code):
            break
    title = rng.choice(_TITLES.split())
    return Program(
        name=title.format(term.name), params=params, returns=ValueKind.INT, doc=f"Return {term.words}.",
        body=(f"return {term.code}",), family=f"arithmetic.{term.shape}", hints=rng.random() < 0.3,
    )  # fmt: skip


_LABELS = (
    ("low", "high", "middle"), ("yes", "no", "maybe"), ("up", "down", "flat"), ("small", "large", "medium"),
    ("left", "right", "centre"),
)  # fmt: skip


def draw_branch(rng: random.Random) -> Program:
    """Two or three ways, each an expression, a constant or a text."""
    params, atoms = _params(rng, rng.choice((1, 2, 2, 3)))
    texts, ways = rng.random() < 0.25, rng.choice((2, 2, 3))
    tests = [draw_test(rng, atoms) for _ in range(ways - 1)]
    if texts:
        drawn = rng.sample(rng.choice(_LABELS), ways)
        ends = [Term(f"'{t}'", f"'{t}'", "t", atom=True) for t in drawn]
    else:
        ends = [draw_term(rng, rng.sample(atoms, len(atoms)), rng.choice((0, 1, 1))) for _ in range(ways)]
    told = [f"{e.words} if {t.words}" for e, t in zip(ends, tests, strict=False)]
    doc = f"Return {'; else '.join(told)}; otherwise {ends[-1].words}."
    if ways == 2 and rng.random() < 0.35:
        body: tuple[str, ...] = (f"return {ends[0].code} if {tests[0].code} else {ends[1].code}",)
    else:
        pairs = zip(tests, ends, strict=False)
        lines = [line for t, e in pairs for line in (f"if {t.code}:", f"    return {e.code}")]
        body = (*lines, f"return {ends[-1].code}")
    shape = ",".join([*(t.shape for t in tests), *(e.shape for e in ends)])
    verb = rng.choice(("choose", "pick", "decide", "select", "adjust", "classify"))
    return Program(
        name=f"{verb}_by_{tests[0].name}", params=params, returns=ValueKind.STR if texts else ValueKind.INT,
        doc=doc, body=body, family=f"branch({shape})", hints=rng.random() < 0.3,
    )  # fmt: skip


def draw_predicate(rng: random.Random) -> Program:
    """A yes-or-no question: one test, or two joined by `and` or `or`."""
    params, atoms = _params(rng, rng.choice((1, 2, 2, 3)))
    first = draw_test(rng, atoms)
    if rng.random() < 0.3:
        code, words, shape = first.code, first.words, first.shape
    else:
        second = draw_test(rng, atoms)
        joint = rng.choice(("and", "or"))
        code, words = f"{first.code} {joint} {second.code}", f"{first.words} {joint} {second.words}"
        shape = f"{joint}({first.shape},{second.shape})"
    names = ("is_valid", "check", "is_allowed", "matches", "accepts", f"test_of_{first.name}", "holds")
    return Program(
        name=rng.choice(names), params=params, returns=ValueKind.BOOL,
        doc=rng.choice(("Tell whether {w}.", "Return True if {w}, else False.")).format(w=words),
        body=(f"return {code}",), family=f"predicate.{shape}", hints=rng.random() < 0.3,
    )  # fmt: skip


def draw_arithmetic(rng: random.Random) -> Program:
    """Any function of integers that reads every parameter."""
    while True:
        program = rng.choice((draw_expression, draw_expression, draw_branch, draw_predicate))(rng)
        if all(re.search(rf"\b{p.name}\b", " ".join(program.body)) for p in program.params):
            return program
