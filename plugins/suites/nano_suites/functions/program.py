"""Small typed Python functions: source, domain of the parameters, family and hash.

Programs are from the grammars of this suite and run in this process; compilation adds a step budget to every
`while` loop, so that no program or mutant runs forever.
"""

from __future__ import annotations

import ast
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nano_rl.tasks.suite import Anonymous, program_hash
from nano_shared.process import parse

MAX_STEPS = 500
"""turns of all `while` loops of one call"""
MAX_BITS = 2048
"""of an integer variable within a `while` loop: a mutant may square it every turn"""


_FILE = "<program>"


class ValueKind(StrEnum):
    """A parameter's type, spelt as its annotation."""

    INT = "int"
    BOOL = "bool"
    STR = "str"
    INTS = "list[int]"
    STRS = "list[str]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A parameter and its domain."""

    name: str
    kind: ValueKind
    low: int = -9
    """least integer, or least element of a list of integers"""
    high: int = 12
    least: int = 0
    """least length of a list or a text; elements of a list of texts are never empty"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One function, written as a signature, a docstring and body lines."""

    name: str
    params: tuple[Param, ...]
    returns: ValueKind
    doc: str
    """one sentence that pins the meaning exactly"""
    body: tuple[str, ...]
    """lines, indented relative to the function's body"""
    family: str
    """shape of the composition without constants and style; splits never share one"""
    hints: bool = False

    @property
    def signature(self) -> str:
        if self.hints:
            params = ", ".join(f"{p.name}: {p.kind}" for p in self.params)
            return f"def {self.name}({params}) -> {self.returns}:"
        return f"def {self.name}({', '.join(p.name for p in self.params)}):"

    @property
    def body_lines(self) -> list[str]:
        return ["    " + line for line in self.body]

    def lines(self, *, doc: bool = True) -> list[str]:
        shown = [f'    """{self.doc}"""'] if doc else []
        return [self.signature, *shown, *self.body_lines]

    def source(self, *, doc: bool = True) -> str:
        return "\n".join(self.lines(doc=doc)) + "\n"

    @property
    def hash(self) -> str:
        return program_hash(self.source(doc=False))


class OutOfSteps(Exception):
    """A `while` loop used up its budget."""


class _Bounded(ast.NodeTransformer):
    """Adds a tick to every `while` loop."""

    def visit_While(self, node: ast.While) -> ast.While:
        self.generic_visit(node)
        scope = ast.Call(ast.Name("locals", ast.Load()), [], [])
        tick = ast.Expr(ast.Call(ast.Name("_tick", ast.Load()), [scope], []))
        node.body.insert(0, tick)
        return node


def compile_function(source: str, name: str) -> Callable[..., Any]:
    """The function `name` of `source`, its `while` loops bounded. Raises SyntaxError."""
    tree = ast.fix_missing_locations(_Bounded().visit(parse(source)))
    steps = [0]

    def tick(variables: dict[str, Any]) -> None:
        steps[0] += 1
        if steps[0] > MAX_STEPS or any(
            isinstance(v, int) and v.bit_length() > MAX_BITS for v in variables.values()
        ):
            raise OutOfSteps(f"{name} took more than {MAX_STEPS} steps or {MAX_BITS} bits")

    scope: dict[str, Any] = {"_tick": tick}
    exec(compile(tree, _FILE, "exec"), scope)
    function = scope[name]

    def call(*args: Any) -> Any:
        steps[0] = 0
        return function(*args)

    return call


FAILURES = (
    ArithmeticError, LookupError, TypeError, ValueError, AttributeError, NameError, MemoryError, OutOfSteps,
)  # fmt: skip
"""what a small function or a mutant of one may raise"""


def outcome(function: Callable[..., Any], args: list[Any]) -> tuple[str, Any]:
    """What a call does: ("value", result) or ("raise", name of the exception). Arguments are copied."""
    try:
        return "value", function(*[list(a) if isinstance(a, list) else a for a in args])
    except FAILURES as err:
        return "raise", type(err).__name__


def failing_line(function: Callable[..., Any], args: list[Any]) -> int | None:
    """Line of the source at which a call raises, 1-based; None where it returns."""
    try:
        function(*[list(a) if isinstance(a, list) else a for a in args])
    except FAILURES as err:
        frames = traceback.extract_tb(err.__traceback__)
        return next((f.lineno for f in reversed(frames) if f.filename == _FILE), None)
    return None


class _Blank(ast.NodeTransformer):
    """Replaces numbers, texts and lists of them by one mark a type."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value is None or isinstance(node.value, bool):
            return node
        return ast.Constant(type(node.value).__name__)

    def visit_List(self, node: ast.List) -> ast.AST:
        if node.elts and all(isinstance(e, ast.Constant) for e in node.elts):
            return ast.Constant("list")
        return self.generic_visit(node)


def skeleton(source: str) -> str:
    """The source's AST as text, with names, annotations, docstrings and constants normalised away."""
    return ast.dump(_Blank().visit(Anonymous().visit(parse(source))))


# ------------------------------------------------------------------------------------------ sampling

_WORDS = """
apple banana pear plum fig kiwi lemon grape melon peach cat dog bird fish horse mouse tiger lion bear wolf
red blue green black white pink gray one two six ten sun moon star rain snow wind tree leaf rock sand lake
river hill road house door book pen cup map box car bus train plane boat level noon radar civic eve otto
data code test loop file line word text name list note bee see too all egg odd aloe area idea Anna Bob Eve
Paris Rome Oslo NASA USB OK a I x Zoo abc cab bac A1 b2 7up x9
"""
WORDS = tuple(_WORDS.split())


def _word(rng: random.Random, wide: bool) -> str:
    if wide and rng.random() < 0.3:
        return "".join(rng.choice("abcdeABxyz019") for _ in range(rng.randint(1, 9)))
    word = rng.choice(WORDS)
    return rng.choice((word, word, word, word.upper(), word.capitalize()))


def _text(rng: random.Random, least: int, wide: bool) -> str:
    while True:
        words = [_word(rng, wide) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5 if wide else 3)))]
        text = rng.choice((" ", " ", " ", "-", ", ")).join(words)
        text = rng.choice((text, text, text, f" {text}", f"{text} ", f"{text}!", text + text[::-1]))
        if len(text) >= least:
            return text


def sample_value(param: Param, rng: random.Random, *, wide: bool = False) -> Any:
    """A value of the parameter's domain; `wide` draws longer lists and texts, and its edges more often."""
    longest = 9 if wide else 5
    if param.kind is ValueKind.INT:
        return rng.choice((param.low, param.high)) if wide and rng.random() < 0.15 else _int(param, rng)
    if param.kind is ValueKind.BOOL:
        return rng.random() < 0.5
    if param.kind is ValueKind.STR:
        return _text(rng, param.least, wide)
    size = max(param.least, rng.choice((rng.randint(0, longest), rng.randint(2, longest))))
    if param.kind is ValueKind.INTS:
        values = [_int(param, rng) for _ in range(size)]
    else:
        values = [_word(rng, wide) for _ in range(size)]
    if size > 1 and rng.random() < 0.3:
        values[rng.randrange(size)] = values[rng.randrange(size)]
    return values


def _int(param: Param, rng: random.Random) -> int:
    return rng.randint(param.low, param.high)


def sample_args(program: Program, rng: random.Random, *, wide: bool = False) -> list[Any]:
    return [sample_value(param, rng, wide=wide) for param in program.params]
