"""Level 6: a further parameter for a function, whose old calls must keep their results."""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nano_rl.tasks.suite import Made
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.process import parse
from nano_shared.types import OracleAction, Split
from nano_suites.functions.admitted_program import (
    LONG,
    MODULES,
    REPAIR_TOOLS,
    AdmittedProgram,
    admit_program,
    belongs,
    call,
    check_of,
    draw_admitted,
    edited,
)
from nano_suites.functions.module import Module, assertions_of, draw_admitted_programs, is_short
from nano_suites.functions.program import Param, Program, ValueKind
from nano_suites.functions.prompt_phrases import EXTEND

NAMES = ("step", "limit", "factor", "bound", "offset", "size")


@dataclass(frozen=True, slots=True)
class Extension:
    """A program with one more parameter at its end; at `default`, it is the old program."""

    program: Program
    default: int | bool
    told: str
    """what the parameter does, as a sentence"""

    @property
    def new(self) -> str:
        return self.program.params[-1].name

    @property
    def signature(self) -> str:
        """With the default in place."""
        head, bracket, tail = self.program.signature.rpartition(")")
        return f"{head}{' = ' if self.program.hints else '='}{self.default}{bracket}{tail}"


def _fresh(names: Sequence[str], program: Program, rng: random.Random) -> str | None:
    text = " ".join((*program.body, *(p.name for p in program.params), program.name))
    free = [n for n in names if n not in text]
    return rng.choice(free) if free else None


def _knob(program: Program, rng: random.Random) -> Extension | None:
    """A number of the body becomes the parameter; it must be the only one with its value."""
    source = program.source(doc=False)
    constants = (n for n in ast.walk(parse(source)) if isinstance(n, ast.Constant))
    numbers = [n for n in constants if type(n.value) is int and n.value >= 2]
    once = [n for n in numbers if [m.value for m in numbers].count(n.value) == 1]
    name = _fresh(NAMES, program, rng)
    if not once or name is None:
        return None
    number = rng.choice(sorted(once, key=lambda n: (n.lineno, n.col_offset)))
    value = int(str(number.value))
    lines = list(program.body)
    # the source without docstring starts at the signature, and its body is indented by four
    line, start, end = number.lineno - 2, number.col_offset - 4, (number.end_col_offset or 0) - 4
    lines[line] = lines[line][:start] + name + lines[line][end:]
    if str(value) not in program.doc:
        return None  # a number that the docstring does not name is a detail of the code
    param = Param(name=name, kind=ValueKind.INT, low=1, high=value + 4)
    return _extended(program, param, lines, value, f"It replaces the number {value}.", "knob")


Twist = tuple[str, Param, str, int | bool, str]
"""key, new parameter, code of the result over `{x}`, default, what the parameter does"""
_BACKWARDS: Twist = (
    "backwards", Param(name="backwards", kind=ValueKind.BOOL), "({x})[::-1] if backwards else {x}", False,
    "If it is true, the result is reversed.",
)  # fmt: skip


def _skip(what: str) -> Twist:
    param = Param(name="skip", kind=ValueKind.INT, low=0, high=3)
    return "skip", param, "({x})[skip:]", 0, f"That many {what} are left out at the start of the result."


_TWISTS: dict[ValueKind, tuple[Twist, ...]] = {
    ValueKind.INT: (
        ("scale", Param(name="scale", kind=ValueKind.INT, low=-3, high=4), "({x}) * scale", 1,
         "The result is multiplied by it."),
        ("shift", Param(name="shift", kind=ValueKind.INT, low=-5, high=9), "({x}) + shift", 0,
         "It is added to the result."),
    ),
    ValueKind.BOOL: (
        ("negate", Param(name="negate", kind=ValueKind.BOOL), "({x}) != negate", False,
         "If it is true, the answer is the opposite."),
    ),
    ValueKind.STR: (
        ("times", Param(name="times", kind=ValueKind.INT, low=0, high=3), "({x}) * times", 1,
         "The result is repeated that many times."),
        _BACKWARDS,
    ),
    ValueKind.INTS: (_BACKWARDS, _skip("values")),
    ValueKind.STRS: (_BACKWARDS, _skip("texts")),
}  # fmt: skip


def _twist(program: Program, rng: random.Random) -> Extension | None:
    """The result is changed after the fact; for bodies with one return, at their end."""
    if sum("return" in line for line in program.body) != 1 or not program.body[-1].startswith("return "):
        return None
    key, param, code, default, told = rng.choice(_TWISTS[program.returns])
    if _fresh((param.name,), program, rng) is None:
        return None
    value = program.body[-1].removeprefix("return ")
    before = list(program.body[:-1])
    if not value.isidentifier():
        held = next(n for n in ("result", "value", "found", "outcome") if n not in " ".join(program.body))
        before.append(f"{held} = {value}")
        value = held
    last = f"return {code.format(x=value).replace(f'({value})', value)}"
    return _extended(program, param, [*before, last], default, told, key)


def _extended(
    program: Program, param: Param, body: list[str], default: int | bool, told: str, key: str
) -> Extension:
    doc, family = f"{program.doc} {param.name}: {told[0].lower()}{told[1:]}", f"{program.family}+{key}"
    more = replace(program, params=(*program.params, param), body=tuple(body), doc=doc, family=family)
    return Extension(more, default, told)


def _draw(rng: random.Random, split: Split) -> tuple[AdmittedProgram, Extension, AdmittedProgram]:
    """A program, its extension in the same split, and what is known of both."""
    while True:
        base = draw_admitted(rng, split, is_short)
        found = rng.choice((_knob, _twist, _twist))(base.program, rng)
        if found is None or not belongs(found.program.family, found.program.source(doc=False), split):
            continue
        wide = admit_program(found.program, rng)
        if wide is None or max(map(len, found.program.lines())) > 150:
            continue
        if any(c.args[-1] != found.default and c.expected is not None for c in wide.examples):
            return base, found, wide


def _spoken(case: Case, new: str) -> Case:
    """The new parameter given by name."""
    return Case(args=case.args[:-1], kwargs={new: case.args[-1]}, expected=case.expected)


def make_extend(rng: random.Random, split: Split, level: int) -> Made:
    """Add a parameter with a default; old calls and the other functions stay as they are."""
    base, extension, wide = _draw(rng, split)
    admitted_programs = draw_admitted_programs(rng, split, rng.choice((2, 3)), [base])
    module = Module(rng.choice(MODULES), tuple(admitted_programs))
    new, name = extension.new, base.program.name
    shown = rng.choice([c for c in wide.examples if c.args[-1] != extension.default])
    said = ", ".join([*map(repr, shown.args[:-1]), f"{new}={shown.args[-1]!r}"])
    test, cases = f"test_{module.name}.py", (*base.hidden, *(_spoken(c, new) for c in wide.hidden))
    return edited(
        extension.program, module.path, *_edits(module, base.program, extension),
        prompt=rng.choice(EXTEND).format(
            name=name, path=module.path, new=new, default=extension.default, told=extension.told,
            call=f"{name}({said})", expected=repr(shown.expected), test=test,
        ),
        files={module.path: module.source(), test: assertions_of([module])}, tools=REPAIR_TOOLS,
        check=check_of(module.name), hidden=CaseChecks(entry_point=name, cases=cases), limits=LONG,
    )  # fmt: skip


def _edits(module: Module, old: Program, extension: Extension) -> list[OracleAction]:
    """Body, docstring and signature, from below, so that no edit moves a line of another."""
    first, new = module.first_line(old.name), extension.program
    at = next(n for n, (a, b) in enumerate(zip(old.body, new.body, strict=False)) if a != b)
    fresh = new.body[at : at + 1] if len(new.body) == len(old.body) else new.body[at:]
    body = "\n".join(f"    {line}" for line in fresh)
    edits = ((3 + at, body), (2, f'    """{new.doc}"""'), (1, extension.signature))
    return [call("edit_file", path=module.path, line=first + line, new=text) for line, text in edits]
