"""Drawing admitted programs of one split from the grammars."""

from __future__ import annotations

import builtins
import random
import re
from collections.abc import Callable
from dataclasses import replace
from keyword import iskeyword

from nano_rl.suites.functions.admitted_program import AdmittedProgram, admit_program
from nano_rl.suites.functions.arithmetic import draw_arithmetic
from nano_rl.suites.functions.classics import draw_classic
from nano_rl.suites.functions.numbers import draw_numbers
from nano_rl.suites.functions.program import Program, skeleton
from nano_rl.suites.functions.texts import draw_texts
from nano_rl.tasks.suite import split_of
from nano_shared.types import Split

VERSION = "2"
"""of the generator: the same key makes the same task only under the same version"""
DRAWS = (draw_numbers, draw_numbers, draw_numbers, draw_texts, draw_texts, draw_texts, draw_arithmetic,
         draw_arithmetic, draw_classic)  # fmt: skip


def belongs(family: str, source: str, split: Split) -> bool:
    """Whether a program is of the split by its family and by the skeleton of its code.

    Two families may meet in one code (a sum of squares, a sum of products of a number with itself); asking
    both keeps equal code out of the other split, and costs each split some programs.
    """
    return split_of(family) is split and split_of(skeleton(source)) is split


def draw_program(rng: random.Random) -> Program:
    """Any program of the grammar, admitted or not."""
    program = rng.choice(DRAWS)(rng)
    return renamed(program, rng)


def renamed(program: Program, rng: random.Random) -> Program:
    """The program with a name that hides no builtin and none of its own variables."""
    inside = set(re.findall(r"\w+", " ".join((*program.body, *(p.name for p in program.params)))))
    if program.name not in inside and not hasattr(builtins, program.name) and not iskeyword(program.name):
        return program
    return replace(
        program, name=f"{program.name}_{rng.choice(('of', 'from', 'in'))}_{program.params[0].name}"
    )


def draw_admitted(
    rng: random.Random,
    split: Split,
    fits: Callable[[Program], bool] = lambda program: True,
    draw: Callable[[random.Random], Program] = draw_program,
) -> AdmittedProgram:
    """The first admitted program of the split that `fits`."""
    while True:
        program = draw(rng)
        if split_of(program.family) is not split or not fits(program):
            continue
        if not belongs(program.family, program.source(doc=False), split):
            continue
        if max(len(line) for line in program.lines()) > 110:
            continue
        if (found := admit_program(program, rng)) is not None:
            return found
