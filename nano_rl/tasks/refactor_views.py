"""Level 6: write a clumsy function within a bound on its source, without changing what it returns."""

from __future__ import annotations

import random
from dataclasses import replace

from nano_coder.runtime import measured
from nano_rl.tasks.clumsy import clumsy
from nano_rl.tasks.grammar import belongs, draw_study
from nano_rl.tasks.made import LONG, MODULES, WRITE_TOOLS, Made, call, cases_of, check_of
from nano_rl.tasks.module import Module, assertions_of
from nano_rl.tasks.phrases import REFACTOR
from nano_rl.tasks.program import Program, compile_function, outcome
from nano_rl.tasks.study import Study
from nano_shared.types import Metric, Split

BOUNDS = {
    "statements": "{n} statements, the def included",
    "lines": "{n} lines of code, the docstring not counted",
}


def _draw(rng: random.Random, split: Split) -> tuple[Study, Program]:
    """A program and its clumsy version, both of the split, with the same results."""
    while True:
        study = draw_study(rng, split, lambda p: clumsy(p) is not None and len(p.body_lines[0]) < 90)
        program = study.program
        worse = replace(program, body=clumsy(program) or ())
        if not belongs(program.family, worse.source(doc=False), split):
            continue
        function = compile_function(worse.source(), program.name)
        cases = (*study.examples, *study.hidden)
        if all(outcome(function, c.args) == ("value", c.expected) for c in cases):
            return study, worse


def make_refactor(rng: random.Random, split: Split, level: int) -> Made:
    """The bound is what the concise version needs; the clumsy one is beyond it."""
    study, worse = _draw(rng, split)
    program, module = study.program, Module(rng.choice(MODULES), (study,))
    name = rng.choice(sorted(BOUNDS))
    needed = (measured({module.path: program.source()}) or {})[name]
    test, check = f"test_{module.name}.py", check_of(module.name)
    return Made(
        prompt=rng.choice(REFACTOR).format(
            name=program.name, path=module.path, test=test, bound=BOUNDS[name].format(n=needed)
        ),
        family=program.family,
        program_hash=program.hash,
        files={module.path: worse.source(), test: assertions_of([module])},
        artifacts=(module.path,),
        tools=WRITE_TOOLS,
        check=check,
        hidden=cases_of(study).model_copy(
            update={"metrics": (Metric.model_validate({"name": name, "at_most": needed}),)}
        ),
        limits=LONG,
        oracle=(
            call("read_file", path=module.path),
            call("write_file", path=module.path, content=program.source()),
            call("shell", command=check),
            call("submit"),
        ),
    )
