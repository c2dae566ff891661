"""Bugs: every way to get one token of a program wrong."""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from nano_rl.tasks.program import Program

_SWAPS: dict[str, tuple[str, ...]] = {
    "+": ("-", "*"), "-": ("+",), "*": ("+", "-"), "//": ("*", "-"), "%": ("//", "+"),
    "<": (">", "<="), ">": ("<", ">="), "<=": ("<", ">="), ">=": (">", "<="), "==": ("!=",), "!=": ("==",),
    "+=": ("-=",), "*=": ("+=",),
    "sum": ("len", "max"), "max": ("min", "sum"), "min": ("max", "sum"), "len": ("sum", "max"),
    "upper": ("lower", "title"), "lower": ("upper", "title"), "True": ("False",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A program with one wrong token."""

    line: int
    """index into the body"""
    body: tuple[str, ...]
    column: int
    old: str
    new: str


def mutants(program: Program) -> Iterator[Mutant]:
    """Every single-token mutant: operators, comparisons, constants, functions, variables."""
    names = [name for name, _ in program.parameters]
    for index, line in enumerate(program.body):
        for token in _tokens(line):
            if token.string == "0" and line[: token.start[1]].endswith("default="):
                continue  # differs on empty input alone
            for new in _replacements(token, names):
                changed = line[: token.start[1]] + new + line[token.end[1] :]
                body = (*program.body[:index], changed, *program.body[index + 1 :])
                yield Mutant(index, body, token.start[1], token.string, new)


def _tokens(line: str) -> list[tokenize.TokenInfo]:
    stripped = line.lstrip()
    indent = len(line) - len(stripped)
    # a block's head alone does not parse, but it tokenises
    found = []
    for token in tokenize.generate_tokens(io.StringIO(stripped).readline):
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER):
            start = (token.start[0], token.start[1] + indent)
            found.append(token._replace(start=start, end=(token.end[0], token.end[1] + indent)))
    return found


def _replacements(token: tokenize.TokenInfo, names: list[str]) -> tuple[str, ...]:
    if token.type == tokenize.NUMBER:
        value = int(token.string)
        return tuple(str(v) for v in (value + 1, value - 1) if v >= 0)
    if token.string in names:
        return tuple(name for name in names if name != token.string)
    return _SWAPS.get(token.string, ())
