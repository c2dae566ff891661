"""Mutants of a function: one operator, constant, index, method, flag or name is replaced.

A mutant changes exactly one line; the rest of the text is unchanged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nano_shared.process import parse

OPERATORS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-", "*")),
    ast.Sub: ("-", ("+", "*")),
    ast.Mult: ("*", ("+", "-")),
    ast.FloorDiv: ("//", ("%", "*")),
    ast.Mod: ("%", ("//", "*")),
    ast.Pow: ("**", ("*",)),
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
    ast.And: ("and", ("or",)),
    ast.Or: ("or", ("and",)),
}
NAMES = {
    "min": ("max",),
    "max": ("min",),
    "sum": ("len", "max"),
    "len": ("sum",),
    "any": ("all",),
    "all": ("any",),
}
METHODS = {
    "upper": ("lower",), "lower": ("upper",), "startswith": ("endswith",), "endswith": ("startswith",),
    "find": ("rfind",), "rfind": ("find",), "isdigit": ("isalpha",), "isalpha": ("isdigit",),
    "isupper": ("islower",), "islower": ("isupper",), "ljust": ("rjust",), "rjust": ("ljust",),
    "strip": ("lstrip", "rstrip"), "title": ("capitalize",), "capitalize": ("title",),
    "swapcase": ("upper",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    kind: str
    """operator, comparison, constant, name, method, flag, variable or step"""
    line: int
    old: str
    new: str
    source: str


@dataclass(frozen=True, slots=True)
class Splice:
    """A change of one line: the text between two columns is replaced."""

    kind: str
    line: int
    start: int
    end: int
    text: str


def _between(lines: list[str], left: ast.expr, right: ast.expr, token: str) -> tuple[int, int, int] | None:
    if left.end_lineno != right.lineno:
        return None
    gap = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    at = gap.find(token)
    if at < 0:
        return None
    start = (left.end_col_offset or 0) + at
    return right.lineno, start, start + len(token)


def _operators(node: ast.AST, lines: list[str]) -> Iterator[Splice]:
    pairs: list[tuple[ast.AST, ast.expr, ast.expr, str]] = []
    if isinstance(node, ast.BinOp):
        pairs = [(node.op, node.left, node.right, "operator")]
    elif isinstance(node, ast.BoolOp):
        pairs = [(node.op, a, b, "operator") for a, b in zip(node.values, node.values[1:], strict=False)]
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        pairs = [(op, operands[i], operands[i + 1], "comparison") for i, op in enumerate(node.ops)]
    for op, left, right, kind in pairs:
        token, others = OPERATORS.get(type(op), ("", ()))
        if token and (place := _between(lines, left, right, token)):
            for other in others:
                yield Splice(kind, *place, other)
    if isinstance(node, ast.AugAssign):
        token, others = OPERATORS.get(type(node.op), ("", ()))
        if token and (place := _between(lines, node.target, node.value, token)):
            for other in others:
                yield Splice("operator", *place, other)


def _constants(node: ast.AST) -> Iterator[Splice]:
    if not isinstance(node, ast.Constant) or node.end_col_offset is None:
        return
    place = (node.lineno, node.col_offset, node.end_col_offset)
    if isinstance(node.value, bool):
        yield Splice("flag", *place, str(not node.value))
    elif isinstance(node.value, int):
        yield Splice("constant", *place, str(node.value + 1))
        if node.value > 0:
            yield Splice("constant", *place, str(node.value - 1))


def _callables(node: ast.AST) -> Iterator[Splice]:
    if not isinstance(node, ast.Call):
        return
    target = node.func
    if isinstance(target, ast.Name):
        for other in NAMES.get(target.id, ()):
            yield Splice("name", target.lineno, target.col_offset, target.col_offset + len(target.id), other)
    elif isinstance(target, ast.Attribute) and target.end_col_offset is not None:
        start = target.end_col_offset - len(target.attr)
        for other in METHODS.get(target.attr, ()):
            yield Splice("method", target.lineno, start, target.end_col_offset, other)


def _variables(node: ast.AST, params: list[str]) -> Iterator[Splice]:
    if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
        return
    if node.id in params and len(params) > 1:
        other = params[(params.index(node.id) + 1) % len(params)]
        yield Splice("variable", node.lineno, node.col_offset, node.col_offset + len(node.id), other)


def _signs(node: ast.AST) -> Iterator[Splice]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield Splice("step", node.lineno, node.col_offset, node.operand.col_offset, "")


def mutants(source: str, name: str | None = None) -> list[Mutant]:
    tree = parse(source)
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and name in (None, n.name))
    every = (mutant_of(source, splice) for splice in _splices(function, source.split("\n")))
    return list({mutant.source: mutant for mutant in every if mutant is not None}.values())


def splices_by_function(source: str) -> list[list[Splice]]:
    """The changes to each function and method that allows any; none for a text that is no Python."""
    try:
        functions = list(_functions(parse(source).body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = source.split("\n")
    return [found for function in functions if (found := _splices(function, lines))]


def mutant_of(source: str, splice: Splice) -> Mutant | None:
    """The mutant with that change; None if it is the source again, or does not parse."""
    lines = source.split("\n")
    old = lines[splice.line - 1]
    new = old[: splice.start] + splice.text + old[splice.end :]
    text = "\n".join([*lines[: splice.line - 1], new, *lines[splice.line :]])
    try:
        parse(text)
    except SyntaxError:
        return None
    return Mutant(splice.kind, splice.line, old, new, text) if text != source else None


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(body: Iterable[ast.stmt]) -> Iterator[_Function]:
    for node in body:
        if isinstance(node, _Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)


def _splices(function: _Function, lines: list[str]) -> list[Splice]:
    """The changes to the body of a function in source order."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    params = [a.arg for a in function.args.args]
    texts = (node for node in ast.walk(function) if isinstance(node, ast.JoinedStr))
    formatted = {part for text in texts for part in ast.walk(text)}  # their columns are wrong before 3.12
    splices: list[Splice] = []
    for statement in body:
        for node in ast.walk(statement):
            if node not in formatted:
                splices += [*_operators(node, lines), *_constants(node), *_callables(node), *_signs(node)]
                splices += _variables(node, params)
    # columns of the syntax tree count bytes
    ascii_only = (splice for splice in splices if lines[splice.line - 1].isascii())
    return sorted(ascii_only, key=lambda splice: (splice.line, splice.start))
