"""The material of the first levels: assignments to copy from, files to write, arithmetic to calculate."""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass
from typing import Any

from nano_rl.suites.functions.program import WORDS, program_hash

_NAMES = """
a b c x y z n m total count name size item word value key left right first last top low high code
"""
NAMES = tuple(_NAMES.split())
KINDS = ("int", "big", "neg", "str", "bool", "ints", "strs", "float", "pair")


@dataclass(frozen=True, slots=True)
class Drawn:
    """Something to show, what is asked of it, and the answer."""

    code: str
    asked: str
    answer: str
    family: str
    source: str
    """as a function, for its hash and its split"""
    value: Any = None

    @property
    def hash(self) -> str:
        return program_hash(self.source)


def _literal(kind: str, rng: random.Random) -> Any:
    match kind:
        case "int":
            return rng.randint(0, 99)
        case "big":
            return rng.randint(100, 9999)
        case "neg":
            return -rng.randint(1, 99)
        case "str":
            return rng.choice([w for w in WORDS if w.isalpha()])
        case "bool":
            return rng.random() < 0.5
        case "ints":
            return [rng.randint(0, 20) for _ in range(rng.randint(2, 4))]
        case "strs":
            return [_literal("str", rng) for _ in range(rng.randint(2, 3))]
        case "float":
            return rng.randint(1, 99) + rng.choice((0.5, 0.25, 0.75))
        case _:
            return [rng.randint(0, 20), _literal("str", rng)]


def _shown(value: Any) -> str:
    """As an answer: texts without quotes."""
    return value if isinstance(value, str) else repr(value)


def draw_copy(rng: random.Random) -> Drawn:
    """One to three assignments, one of them asked for, perhaps through an alias."""
    count = rng.choice((1, 2, 2, 3))
    kinds = [rng.choice(KINDS) for _ in range(count)]
    names = rng.sample(NAMES, count + 1)
    values = [_literal(kind, rng) for kind in kinds]
    lines = [f"{n} = {v!r}" for n, v in zip(names, values, strict=False)]
    index = rng.randrange(count)
    asked, alias = names[index], ""
    if count < 3 and rng.random() < 0.25:
        asked, alias = names[count], ".alias"
        lines.append(f"{asked} = {names[index]}")
    code = "\n".join(lines)
    body = "\n".join(f"    {line}" for line in lines)
    return Drawn(
        code=code,
        asked=asked,
        answer=_shown(values[index]),
        family=f"copy.{'-'.join(kinds)}.{index}{alias}",
        source=f"def f():\n{body}\n    return {asked}\n",
    )


def draw_emit(rng: random.Random) -> Drawn:
    """A file with one function that returns a literal, perhaps through a variable."""
    kind = rng.choice(KINDS)
    value = _literal(kind, rng)
    name = rng.choice(
        ("get_value", "answer", "default", "load", "item", "result", "main", "start", "limit", "config")
    )
    if rng.random() < 0.4:
        inner = rng.choice([n for n in NAMES if n != name])
        code, shape = f"def {name}():\n    {inner} = {value!r}\n    return {inner}\n", "named"
    else:
        code, shape = f"def {name}():\n    return {value!r}\n", "plain"
    # the module's name says nothing about the value, so it is no part of the family
    path = f"{rng.choice(('out', 'main', 'value', 'data', 'mod', 'item', 'conf', 'setup_a'))}.py"
    return Drawn(code, path, name, f"emit.{kind}.{shape}", code, value)


_OPS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}
_SAID = {"add": "plus", "sub": "minus", "mul": "times"}


def _expression(rng: random.Random, size: int) -> tuple[str, str]:
    """Code and shape of an expression with `size` operators; divisors are positive literals."""
    if size == 0:
        return str(rng.randint(2, 99)), "n"
    op = rng.choice(list(_OPS))
    left, left_shape = _expression(rng, size - 1 if op in ("floordiv", "mod") else rng.randint(0, size - 1))
    used = left_shape.count("(")
    rest = 0 if op in ("floordiv", "mod") else size - 1 - used
    right, right_shape = _expression(rng, rest)
    if op in ("floordiv", "mod"):
        right = str(rng.randint(2, 12))
    left = left if left.isdigit() else f"({left})"
    right = right if right.isdigit() else f"({right})"
    return f"{left} {_OPS[op]} {right}", f"{op}({left_shape},{right_shape})"


def draw_sum(rng: random.Random) -> Drawn:
    """A question of arithmetic over literals."""
    code, shape = _expression(rng, rng.choice((1, 2, 2, 3)))
    said = code
    if shape.count("(") == 1 and rng.random() < 0.4:
        for op, word in _SAID.items():
            said = said.replace(f" {_OPS[op]} ", f" {word} ")
    value = eval(compile(ast.parse(code, mode="eval"), "<sum>", "eval"), {"__builtins__": {}})
    return Drawn(code, said, str(value), f"calculate.{shape}", f"def f():\n    return {code}\n")
