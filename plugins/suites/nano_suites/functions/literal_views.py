"""Levels 0 to 2: a literal to copy, a file to write, a value to predict, an operator to choose or replace."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nano_rl.tasks.suite import Made, program_hash
from nano_shared.hidden_checks import AnswerChecks, Case, CaseChecks
from nano_shared.process import parse_expression
from nano_shared.types import OracleAction, Split
from nano_suites.functions.admitted_program import (
    BRIEF,
    MODULES,
    AdmittedProgram,
    belongs,
    call,
    call_text,
    cases_of,
    claim,
    draw_admitted,
    failing,
    made_of,
    numbered,
)
from nano_suites.functions.arithmetic import draw_arithmetic
from nano_suites.functions.program import WORDS, Program
from nano_suites.functions.prompt_phrases import CHOOSE, COMPLETE, COPY, EMIT, PREDICT, REPLACE, SUMS

_NAMES = """
a b c x y z n m total count name size item word value key left right first last top low high code
"""
NAMES = tuple(_NAMES.split())
_FUNCTIONS = "get_value answer default load item result main start limit config"
_PATHS = "out main value data mod item conf setup_a"


def _letters(rng: random.Random) -> str:
    return rng.choice([word for word in WORDS if word.isalpha()])


LITERALS: dict[str, Callable[[random.Random], Any]] = {
    "int": lambda rng: rng.randint(0, 99), "big": lambda rng: rng.randint(100, 9999),
    "neg": lambda rng: -rng.randint(1, 99), "str": _letters, "bool": lambda rng: rng.random() < 0.5,
    "ints": lambda rng: [rng.randint(0, 20) for _ in range(rng.randint(2, 4))],
    "strs": lambda rng: [_letters(rng) for _ in range(rng.randint(2, 3))],
    "float": lambda rng: rng.randint(1, 99) + rng.choice((0.5, 0.25, 0.75)),
    "pair": lambda rng: [rng.randint(0, 20), _letters(rng)],
}  # fmt: skip
KINDS = tuple(LITERALS)


@dataclass(frozen=True, slots=True)
class LiteralQuestion:
    """A question about literals: code, question and answer."""

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


def draw_copy(rng: random.Random) -> LiteralQuestion:
    """One to three assignments, one of them asked for, perhaps through an alias."""
    count = rng.choice((1, 2, 2, 3))
    kinds = [rng.choice(KINDS) for _ in range(count)]
    names = rng.sample(NAMES, count + 1)
    values = [LITERALS[kind](rng) for kind in kinds]
    lines = [f"{n} = {v!r}" for n, v in zip(names, values, strict=False)]
    index = rng.randrange(count)
    asked, alias = names[index], ""
    if count < 3 and rng.random() < 0.25:
        asked, alias = names[count], ".alias"
        lines.append(f"{asked} = {names[index]}")
    code = "\n".join(lines)
    body = "\n".join(f"    {line}" for line in lines)
    value, source = values[index], f"def f():\n{body}\n    return {asked}\n"
    answer = value if isinstance(value, str) else repr(value)
    return LiteralQuestion(code, asked, answer, f"copy.{'-'.join(kinds)}.{index}{alias}", source)


def draw_emit(rng: random.Random) -> LiteralQuestion:
    """A file with one function that returns a literal, perhaps through a variable."""
    kind = rng.choice(KINDS)
    value = LITERALS[kind](rng)
    name = rng.choice(_FUNCTIONS.split())
    if rng.random() < 0.4:
        inner = rng.choice([n for n in NAMES if n != name])
        code, shape = f"def {name}():\n    {inner} = {value!r}\n    return {inner}\n", "named"
    else:
        code, shape = f"def {name}():\n    return {value!r}\n", "plain"
    # the module's name says nothing about the value, so it is no part of the family
    path = f"{rng.choice(_PATHS.split())}.py"
    return LiteralQuestion(code, path, name, f"emit.{kind}.{shape}", code, value)


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


def draw_sum(rng: random.Random) -> LiteralQuestion:
    """A question of arithmetic over literals."""
    code, shape = _expression(rng, rng.choice((1, 2, 2, 3)))
    said = code
    if shape.count("(") == 1 and rng.random() < 0.4:
        for op, word in _SAID.items():
            said = said.replace(f" {_OPS[op]} ", f" {word} ")
    value = eval(compile(parse_expression(code), "<sum>", "eval"), {"__builtins__": {}})
    return LiteralQuestion(code, said, str(value), f"calculate.{shape}", f"def f():\n    return {code}\n")


SOLUTION = "solution.py"

# ---------------------------------------------------------------------------------------------- level 0


def _draw(
    draw: Callable[[random.Random], LiteralQuestion], rng: random.Random, split: Split
) -> LiteralQuestion:
    """The first that belongs to the split."""
    while not belongs((drawn := draw(rng)).family, drawn.source, split):
        pass
    return drawn


def make_copy(rng: random.Random, split: Split, level: int) -> Made:
    """The prompt assigns a few names; submit the value of one."""
    drawn = _draw(draw_copy, rng, split)
    return _asked(drawn, rng.choice(COPY).format(code=drawn.code, name=drawn.asked), drawn.answer)


def _asked(program: Any, prompt: str, answer: str, *steps: OracleAction) -> Made:
    """A question whose answer is submitted after the steps."""
    return made_of(
        program, prompt=prompt, tools=(*(step.name for step in steps), "submit"),
        hidden=AnswerChecks(answer=answer), oracle=(*steps, call("submit", answer=answer)),
    )  # fmt: skip


def _acted(program: Any, prompt: str, path: str, hidden: CaseChecks, step: OracleAction, **more: Any) -> Made:
    """A file that one step writes or edits."""
    return made_of(
        program, prompt=prompt, artifacts=(path,), tools=(step.name, "submit"), hidden=hidden,
        oracle=(step, call("submit")), **more,
    )  # fmt: skip


def make_emit(rng: random.Random, split: Split, level: int) -> Made:
    """Write a given small function to a file."""
    if rng.random() < 0.7:
        return _emit_program(rng, split)
    drawn = _draw(draw_emit, rng, split)
    prompt = rng.choice(EMIT).format(code=drawn.code.rstrip("\n"), path=drawn.asked)
    hidden = CaseChecks(entry_point=drawn.answer, cases=(Case(args=[], expected=drawn.value),))
    write = call("write_file", path=drawn.asked, content=drawn.code)
    return _acted(drawn, prompt, drawn.asked, hidden, write)


def _emit_program(rng: random.Random, split: Split) -> Made:
    admitted = draw_admitted(rng, split, lambda p: len(p.body) == 1 and len(p.source(doc=False)) < 75)
    program, path = admitted.program, f"{rng.choice(MODULES)}.py"
    text = program.source(doc=False)
    prompt = rng.choice(EMIT).format(code=text.rstrip("\n"), path=path)
    return _acted(program, prompt, path, cases_of(admitted), call("write_file", path=path, content=text))


# ---------------------------------------------------------------------------------------------- level 1


def make_calculate(rng: random.Random, split: Split, level: int) -> Made:
    """A question of arithmetic, for the tool calculate."""
    drawn = _draw(draw_sum, rng, split)
    prompt = rng.choice(SUMS).format(q=drawn.asked)
    return _asked(drawn, prompt, drawn.answer, call("calculate", expression=drawn.code))


def make_predict(rng: random.Random, split: Split, level: int) -> Made:
    """Predict what a call returns; never the empty text, which is what submitting nothing would be."""
    while True:
        admitted = draw_admitted(rng, split, lambda p: len(p.body) <= 2 and len(p.source(doc=False)) < 120)
        short = [c for c in (*admitted.examples, *admitted.hidden) if len(repr(c.expected)) < 30]
        if short and (case := rng.choice(short)).expected != "":
            break
    program, code = admitted.program, admitted.program.source(doc=False).rstrip("\n")
    prompt = rng.choice(PREDICT).format(code=code, call=call_text(program.name, case))
    return _asked(program, prompt, repr(case.expected))


_HOLE = re.compile(r" (\+|-|\*|//|%|<=|>=|<|>|==|!=|and|or) ")
_ALIKE = (("+", "-", "*", "//", "%"), ("<", "<=", ">", ">=", "==", "!="), ("and", "or"))


def _holes(program: Program) -> list[tuple[str, str]]:
    """Every (body line with `?` for one operator, operator) of a one-line body."""
    line = program.body_lines[-1]
    return [(f"{line[: m.start()]} ? {line[m.end() :]}", m.group(1)) for m in _HOLE.finditer(line)]


def _settles(admitted: AdmittedProgram, holed: str, operator: str, cases: tuple[Case, ...]) -> bool:
    """Whether the cases fail with every other operator in the hole."""
    others = (other for other in next(group for group in _ALIKE if operator in group) if other != operator)
    head = admitted.program.signature
    sources = (f"{head}\n{holed.replace(' ? ', f' {other} ')}\n" for other in others)
    return all(any(failing(admitted, source, cases)) for source in sources)


def make_complete(rng: random.Random, split: Split, level: int) -> Made:
    """A function whose operator is `?`, shown with two examples that settle it."""
    while True:
        admitted = draw_admitted(rng, split, lambda p: len(p.body) == 1 and len(p.source(doc=False)) < 110)
        program = admitted.program
        holes = _holes(program)
        shown = tuple(sorted(admitted.examples, key=lambda c: len(repr(c.args) + repr(c.expected)))[-3:-1])
        holes = [h for h in holes if _settles(admitted, *h, shown)]
        if holes and sum(len(repr(c.args)) for c in shown) < 80:
            break
    holed, _ = rng.choice(holes)
    path, text = f"{rng.choice(MODULES)}.py", f"{program.signature}\n{holed}\n"
    examples = "\n".join(claim(program.name, c) for c in shown)
    prompt = rng.choice(COMPLETE).format(path=path, code=numbered(text), examples=examples)
    edit = call("edit_file", path=path, line=2, new=program.body_lines[0])
    return _acted(program, prompt, path, cases_of(admitted), edit, files={path: text})


def make_choose(rng: random.Random, split: Split, level: int) -> Made:
    """Submit the operator that a `?` stands for, by the docstring: short enough for a million parameters."""
    admitted = draw_admitted(rng, split, lambda p: len(p.body) == 1 and len(_holes(p)) == 1, draw_arithmetic)
    ((holed, operator),) = _holes(admitted.program)
    return _asked(admitted.program, CHOOSE.format(doc=admitted.program.doc, line=holed.strip()), operator)


def make_replace(rng: random.Random, split: Split, level: int) -> Made:
    """Edit the one operator that the docstring contradicts: as short as an edit can be."""
    while True:
        fits: Callable[[Program], bool] = lambda p: len(p.body) == 1 and 0 < len(_holes(p)) < 3  # noqa: E731
        admitted = draw_admitted(rng, split, fits, draw_arithmetic)
        program = admitted.program
        holed, operator = rng.choice(_holes(program))
        wrong = rng.choice([o for o in next(g for g in _ALIKE if operator in g) if o != operator])
        text = f'{program.signature}\n    """{program.doc}"""\n{holed.replace(" ? ", f" {wrong} ")}\n'
        # the edit names the operator alone, so it must stand nowhere else; and it must do harm
        if text.count(wrong) == 1 and any(failing(admitted, text, admitted.hidden)):
            break
    prompt = REPLACE.format(code=text.rstrip("\n"), path=SOLUTION)
    edit = call("edit_file", path=SOLUTION, old=wrong, new=operator)
    return _acted(program, prompt, SOLUTION, cases_of(admitted), edit, files={SOLUTION: text}, limits=BRIEF)
