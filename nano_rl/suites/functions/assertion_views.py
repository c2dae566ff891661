"""Level 5: write the tests that notice given mistakes in a function that is right."""

from __future__ import annotations

import random

from nano_rl.suites.functions.admitted_program import Study
from nano_rl.suites.functions.grammar import draw_study
from nano_rl.suites.functions.module import is_short, runs
from nano_rl.suites.functions.phrases import WRITE_TEST
from nano_rl.suites.functions.program import compile_function, outcome
from nano_rl.suites.functions.view import LONG, MODULES, WRITE_TOOLS, call, check_of, claim
from nano_rl.tasks.mutate import Mutant
from nano_rl.tasks.suite import Made
from nano_shared.types import Case, HiddenChecks, Split

MOST = 3
"""mistakes of one task"""


def _mistakes(study: Study, rng: random.Random) -> list[tuple[Mutant, Case]]:
    """Up to MOST mutants that end on every case, each with a case that tells it apart."""
    cases = (*study.examples, *study.hidden)
    found: list[tuple[Mutant, Case]] = []
    for bug in rng.sample(study.bugs, len(study.bugs)):
        if len(found) == MOST:
            break
        if not runs(study, bug, shown=len(study.examples)):
            continue
        wrong = compile_function(bug.source, study.program.name)
        telling = [c for c in cases if outcome(wrong, c.args) != ("value", c.expected)]
        found.append((bug, min(telling, key=lambda c: len(claim(study.program.name, c)))))
    return found


def make_write_test(rng: random.Random, split: Split, level: int) -> Made:
    """The mistakes are given as changed lines; the tests must pass on the function and fail on each."""
    while True:
        study = draw_study(rng, split, is_short)
        if found := _mistakes(study, rng):
            break
    program, module = study.program, rng.choice(MODULES)
    path, test, source = f"{module}.py", f"test_{module}.py", study.program.source()
    changes = "\n".join(f"line {bug.line}: {bug.old.strip()} -> {bug.new.strip()}" for bug, _ in found)
    claims = dict.fromkeys(claim(program.name, case) for _, case in found)
    text = "".join([f"from {module} import {program.name}\n", *(f"assert {said}\n" for said in claims)])
    return Made(
        prompt=rng.choice(WRITE_TEST).format(name=program.name, path=path, test=test, changes=changes),
        family=program.family,
        program_hash=program.hash,
        files={path: source},
        artifacts=(test,),
        tools=WRITE_TOOLS,
        check=check_of(module),
        hidden=HiddenChecks(
            kind="mutants",
            mutants={f"change_{n}": bug.source for n, (bug, _) in enumerate(found, start=1)},
            reference=source,
            module=path,
        ),
        limits=LONG,
        oracle=(
            call("read_file", path=path),
            call("write_file", path=test, content=text),
            call("shell", command=check_of(module)),
            call("submit"),
        ),
    )
