"""Levels 5 to 7: fix one or two bugs shown by a traceback; write assertions that find bugs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from nano_rl.tasks.mutate import Mutant
from nano_rl.tasks.suite import Made
from nano_shared.hidden_checks import Case, MutantChecks
from nano_shared.types import OracleAction, Split
from nano_suites.functions.admitted_program import (
    LONG,
    MODULES,
    REPAIR_TOOLS,
    SEARCH_TOOLS,
    WRITE_TOOLS,
    AdmittedProgram,
    call,
    call_text,
    check_of,
    claim,
    correct,
    draw_admitted,
    edited,
    failing,
    made_of,
)
from nano_suites.functions.module import (
    Module,
    assertions_of,
    draw_admitted_programs,
    draw_bug,
    imports_of,
    is_short,
    runs,
    top_of,
)
from nano_suites.functions.program import compile_function, failing_line, outcome
from nano_suites.functions.prompt_phrases import AMONG, DEEP, MANY, TRACE, WRITE_TEST

MOST = 3
"""mistakes of one task"""


def _mistakes(admitted: AdmittedProgram, rng: random.Random) -> list[tuple[Mutant, Case]]:
    """Up to MOST mutants that end on every case, each with a case that tells it apart."""
    cases = (*admitted.examples, *admitted.hidden)
    found: list[tuple[Mutant, Case]] = []
    for bug in rng.sample(admitted.bugs, len(admitted.bugs)):
        if len(found) == MOST:
            break
        if not runs(admitted, bug, shown=len(admitted.examples)):
            continue
        telling = failing(admitted, bug.source, cases)
        found.append((bug, min(telling, key=lambda c: len(claim(admitted.program.name, c)))))
    return found


def make_write_test(rng: random.Random, split: Split, level: int) -> Made:
    """The mistakes are given as changed lines; the tests must pass on the function and fail on each."""
    while True:
        admitted = draw_admitted(rng, split, is_short)
        if found := _mistakes(admitted, rng):
            break
    program, module = admitted.program, rng.choice(MODULES)
    path, test, source = f"{module}.py", f"test_{module}.py", admitted.program.source()
    changes = "\n".join(f"line {bug.line}: {bug.old.strip()} -> {bug.new.strip()}" for bug, _ in found)
    claims = dict.fromkeys(claim(program.name, case) for _, case in found)
    text = "".join([f"from {module} import {program.name}\n", *(f"assert {said}\n" for said in claims)])
    mutants = {f"change_{n}": bug.source for n, (bug, _) in enumerate(found, start=1)}
    return edited(
        program, path, call("write_file", path=test, content=text),
        prompt=rng.choice(WRITE_TEST).format(name=program.name, path=path, test=test, changes=changes),
        files={path: source}, artifacts=(test,), tools=WRITE_TOOLS, check=check_of(module),
        hidden=MutantChecks(mutants=mutants, reference=source, module=path), limits=LONG,
    )  # fmt: skip


Bugs = dict[str, Mutant]
"""function -> what is wrong with it"""


def _draw_faulty(rng: random.Random, split: Split, count: int) -> tuple[list[AdmittedProgram], Bugs]:
    """`count` admitted programs with a bug each, all shown by the first two examples."""
    admitted_programs: list[AdmittedProgram] = []
    bugs: Bugs = {}
    while len(admitted_programs) < count:
        admitted = draw_admitted(rng, split, is_short)
        bug = draw_bug(admitted, rng)
        if bug is not None and admitted.program.name not in bugs:
            admitted_programs.append(admitted)
            bugs[admitted.program.name] = bug
    return admitted_programs, bugs


def _first_failure(admitted_programs: Sequence[AdmittedProgram], bugs: Bugs) -> tuple[AdmittedProgram, Case]:
    """The assertion at which the test script stops."""
    for admitted in admitted_programs:
        bug = bugs.get(admitted.program.name)
        for case in failing(admitted, bug.source, admitted.examples[:2]) if bug else ():
            return admitted, case
    raise ValueError("no bug is shown by an example")


def trace_of(modules: Sequence[Module], bugs: Bugs, test: str) -> str:
    """What Python prints when the test script stops: the frames in these files, then the exception's name."""
    admitted_programs = [s for m in modules for s in m.admitted_programs]
    admitted, case = _first_failure(admitted_programs, bugs)
    name = admitted.program.name
    said = f"assert {claim(name, case)}"
    line = assertions_of(modules).split("\n").index(said) + 1
    where = f'  File "/work/{test}", line {line}, in <module>'
    shown = ["Traceback (most recent call last):", where, f"    {said}"]
    bug, module = bugs[name], next(m for m in modules if admitted in m.admitted_programs)
    function = compile_function(bug.source, name)
    what, raised = outcome(function, case.args)
    at = failing_line(function, case.args)
    if at is not None:
        shown.append(f'  File "/work/{module.path}", line {module.first_line(name) + at}, in {name}')
        shown.append(f"    {bug.source.splitlines()[at - 1].strip()}")
    return "\n".join([*shown, "AssertionError" if what == "value" else str(raised)])


def _correction(module: Module, name: str, bug: Mutant) -> OracleAction:
    first = module.first_line(name)
    thought = f"{name} is wrong.\n{first + 1}|{bug.source.partition(chr(10))[0]}\n"
    return correct(module.path, first + bug.line, bug.new, bug.old, thought=thought)


def make_module_repair(rng: random.Random, split: Split, level: int) -> Made:
    """Level 5: a module with one or two bugs, and the traceback of the first; level 6: four or five
    functions, of which what was right must stay right."""
    traced = level == 5
    faulty, bugs = _draw_faulty(rng, split, rng.choice((1, 1, 2) if traced else (1, 2, 2)))
    admitted_programs = draw_admitted_programs(rng, split, rng.choice((2, 3) if traced else (4, 5)), faulty)
    module, top = Module(rng.choice(MODULES), tuple(admitted_programs)), top_of(admitted_programs, rng)
    test, check = f"test_{module.name}.py", check_of(module.name)
    main = next(s for s in admitted_programs if s.program.name in bugs)
    oracle = [call("shell", command=check), call("read_file", path=module.path)]
    for admitted in admitted_programs:  # in the order in which the script meets them
        if bug := bugs.get(admitted.program.name):
            oracle += [_correction(module, admitted.program.name, bug), call("shell", command=check)]
    wording, trace = rng.choice(TRACE if traced else MANY), trace_of([module], bugs, test) if traced else ""
    return made_of(
        main.program, prompt=wording.format(path=module.path, test=test, count=len(bugs), trace=trace),
        files={module.path: module.source(bugs, top.source), test: assertions_of([module])},
        artifacts=(module.path,), tools=REPAIR_TOOLS, check=check, hidden=top.hidden, limits=LONG,
        oracle=(*oracle, call("submit")),
    )  # fmt: skip


def _workspace(
    rng: random.Random, split: Split, admitted: AdmittedProgram
) -> tuple[list[Module], list[AdmittedProgram]]:
    """Three or four modules of one or two functions, one of them the given one."""
    count = rng.choice((3, 4))
    sizes = [rng.choice((1, 2)) for _ in range(count)]
    admitted_programs = draw_admitted_programs(rng, split, sum(sizes), [admitted])
    names, modules, at = rng.sample(MODULES, count), [], 0
    for name, size in zip(names, sizes, strict=True):
        modules.append(Module(name, tuple(admitted_programs[at : at + size])))
        at += size
    return modules, admitted_programs


def make_edit_among_files(rng: random.Random, split: Split, level: int, *, traced: bool = False) -> Made:
    """Level 7: a function is named, its file is not."""
    (admitted,), bugs = _draw_faulty(rng, split, 1)
    name, bug = admitted.program.name, bugs[admitted.program.name]
    modules, admitted_programs = _workspace(rng, split, admitted)
    home, top = next(m for m in modules if admitted in m.admitted_programs), top_of(admitted_programs, rng)
    test, check = "test_main.py", check_of("main")
    case = next(failing(admitted, bug.source))
    prompt = rng.choice(DEEP if traced else AMONG).format(
        test=test, name=name, trace=trace_of(modules, bugs, test) if traced else "",
        call=call_text(name, case), expected=repr(case.expected),
    )  # fmt: skip
    files = {"main.py": f"{imports_of(modules)}\n\n{top.source}", **{m.path: m.source(bugs) for m in modules}}
    made = edited(
        admitted.program, home.path, _correction(home, name, bug), prompt=prompt, check=check,
        files={**files, test: assertions_of(modules)}, tools=SEARCH_TOOLS, hidden=top.hidden, limits=LONG,
        artifacts=("main.py", *sorted(m.path for m in modules)),
    )  # fmt: skip
    return replace(made, oracle=(call("search", pattern=f"def {name}"), *made.oracle))


def make_deep_repair(rng: random.Random, split: Split, level: int) -> Made:
    """Level 7: the traceback of a bug in one of several modules."""
    return make_edit_among_files(rng, split, level, traced=True)
