"""Level 2: one operator to correct. Levels 3 and 4: a body to write."""

from __future__ import annotations

import random

from nano_rl.tasks.grammar import draw_study
from nano_rl.tasks.made import (
    FILE_TOOLS,
    MODULES,
    REPAIR_TOOLS,
    USUAL,
    Made,
    call,
    call_text,
    cases_of,
    check_of,
    correct,
)
from nano_rl.tasks.module import Module, assertions_of, draw_bug, has_blocks
from nano_rl.tasks.phrases import OPERATOR, WRITE
from nano_rl.tasks.program import compile_function, outcome
from nano_shared.types import Split

PLACEHOLDERS = ("pass", "...", "return None", "raise NotImplementedError")


def make_fix_operator(rng: random.Random, split: Split, level: int) -> Made:
    """One operator of a short function is wrong against the docstring."""
    while True:
        study = draw_study(rng, split, lambda p: len(p.body) <= 4 and max(map(len, p.body_lines)) < 90)
        bug = draw_bug(study, rng, shown=len(study.examples), kinds=("operator", "comparison"))
        if bug is not None:
            break
    program, path = study.program, f"{rng.choice(MODULES)}.py"
    wrong = compile_function(bug.source, program.name)
    case = next(c for c in study.examples if outcome(wrong, c.args) != ("value", c.expected))
    return Made(
        prompt=rng.choice(OPERATOR).format(
            name=program.name, path=path, call=call_text(program.name, case), expected=repr(case.expected)
        ),
        family=program.family,
        program_hash=program.hash,
        files={path: bug.source},
        artifacts=(path,),
        tools=FILE_TOOLS,
        hidden=cases_of(study),
        limits=USUAL,
        oracle=(call("read_file", path=path), correct(path, bug.line, bug.new, bug.old), call("submit")),
    )


def make_write_body(rng: random.Random, split: Split, level: int) -> Made:
    """A body of two to six lines with a loop or a branch; a test script may be run."""
    study = draw_study(rng, split, has_blocks)
    program, module = study.program, Module(rng.choice(MODULES), (study,))
    head = f'{program.signature}\n    """{program.doc}"""\n'
    test = f"test_{module.name}.py"
    return Made(
        prompt=rng.choice(WRITE).format(name=program.name, path=module.path, test=test),
        family=program.family,
        program_hash=program.hash,
        files={
            module.path: f"{head}    {rng.choice(PLACEHOLDERS)}\n",
            test: assertions_of([module], shown=3),
        },
        artifacts=(module.path,),
        tools=REPAIR_TOOLS,
        check=check_of(module.name),
        hidden=cases_of(study),
        limits=USUAL,
        oracle=(
            call("read_file", path=module.path),
            call("edit_file", path=module.path, line=3, new="\n".join(program.body_lines)),
            call("shell", command=check_of(module.name)),
            call("submit"),
        ),
    )
