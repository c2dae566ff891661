"""Levels 2 and 3: a line to fix, a body to write, a module to repair."""

from __future__ import annotations

import random
from dataclasses import replace

from nano_rl.tasks.mutate import Mutant
from nano_rl.tasks.suite import Made
from nano_shared.hidden_checks import Case
from nano_shared.types import Limits, OracleAction, Split
from nano_suites.functions.admitted_program import (
    CHECK,
    FILE_TOOLS,
    MODULES,
    REPAIR_TOOLS,
    USUAL,
    AdmittedProgram,
    call,
    call_text,
    cases_of,
    check_of,
    claim,
    correct,
    draw_admitted,
    edited,
    failing,
)
from nano_suites.functions.module import (
    Module,
    assertions_of,
    draw_admitted_programs,
    draw_bug,
    ends,
    has_blocks,
    is_short,
)
from nano_suites.functions.prompt_phrases import BODY, FIX, OPERATOR, REPAIR, WRITE

PLACEHOLDERS = ("pass", "...", "return None", "raise NotImplementedError")


def make_fix_operator(rng: random.Random, split: Split, level: int) -> Made:
    """One operator of a short function is wrong against the docstring."""
    while True:
        admitted = draw_admitted(rng, split, lambda p: len(p.body) <= 4 and max(map(len, p.body_lines)) < 90)
        bug = draw_bug(admitted, rng, shown=len(admitted.examples), kinds=("operator", "comparison"))
        if bug is not None:
            break
    path = f"{rng.choice(MODULES)}.py"
    return _wrong_line(admitted, bug, path, next(failing(admitted, bug.source)), rng.choice(OPERATOR))


def _wrong_line(admitted: AdmittedProgram, bug: Mutant, path: str, case: Case, wording: str) -> Made:
    """The file of one function with a line to correct; the prompt shows what a call should return."""
    name = admitted.program.name
    said = {"call": call_text(name, case), "expected": repr(case.expected)}
    return edited(
        admitted.program, path, correct(path, bug.line, bug.new, bug.old),
        prompt=wording.format(name=name, path=path, **said), files={path: bug.source}, tools=FILE_TOOLS,
        hidden=cases_of(admitted), limits=USUAL,
    )  # fmt: skip


def make_write_body(rng: random.Random, split: Split, level: int) -> Made:
    """A body of two to six lines with a loop or a branch; a test script may be run."""
    admitted = draw_admitted(rng, split, has_blocks)
    program, module = admitted.program, Module(rng.choice(MODULES), (admitted,))
    head = f'{program.signature}\n    """{program.doc}"""\n'
    test = f"test_{module.name}.py"
    prompt = rng.choice(WRITE).format(name=program.name, path=module.path, test=test)
    started = f"{head}    {rng.choice(PLACEHOLDERS)}\n"
    return edited(
        program, module.path, call("edit_file", path=module.path, line=3, new="\n".join(program.body_lines)),
        prompt=prompt, files={module.path: started, test: assertions_of([module], shown=3)},
        tools=REPAIR_TOOLS, check=check_of(module.name), hidden=cases_of(admitted), limits=USUAL,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ levels 2, 3

_SUBTLE = ("constant", "variable", "flag", "step")
_TIMES_IN_VAIN = (1, 1, 2, 2, 3)
"""drawn from; a run has eight turns, of which its oracle needs up to four"""
_IN_VAIN = Limits(max_turns=8, max_tokens=3072)
"""of an oracle, which is text, a limit on tokens counts bytes"""


def _bug(admitted: AdmittedProgram, rng: random.Random, *, subtle: bool) -> Mutant | None:
    """A mutant that ends and an example shows; subtle: off by one, at a boundary, another name."""
    bugs = [m for m in admitted.bugs if any(failing(admitted, m.source))]
    hard = [m for m in bugs if m.kind in _SUBTLE or (m.kind == "comparison" and len(m.new) != len(m.old))]
    if subtle and hard:
        bugs = hard
    kinds = sorted({m.kind for m in bugs})
    if not kinds:
        return None
    kind = rng.choice(kinds)
    bug = rng.choice([m for m in bugs if m.kind == kind])
    return bug if ends(admitted, bug) else None


def make_fix(rng: random.Random, split: Split, level: int) -> Made:
    """One line is wrong against the docstring; the file must be read first."""
    while True:
        admitted = draw_admitted(rng, split, is_short)
        if (bug := _bug(admitted, rng, subtle=False)) is not None:
            break
    path = f"{rng.choice(MODULES)}.py"
    case = rng.choice(list(failing(admitted, bug.source)))
    return _wrong_line(admitted, bug, path, case, rng.choice(FIX))


def _tests(module: str, admitted_programs: list[AdmittedProgram]) -> str:
    """A pytest file with two or three examples a function."""
    names = ", ".join(s.program.name for s in admitted_programs)
    blocks = [f"from {module} import {names}\n"]
    for admitted in admitted_programs:
        name = admitted.program.name
        lines = [f"    assert {claim(name, c)}" for c in admitted.examples]
        blocks.append(f"\n\ndef test_{name}():\n" + "\n".join(lines) + "\n")
    return "".join(blocks)


def make_repair(rng: random.Random, split: Split, level: int) -> Made:
    """A module of two or three functions, one of them buggy, with tests that fail."""
    hard = level >= 3
    while True:
        admitted = draw_admitted(
            rng, split, lambda p: is_short(p) and (not hard or len(p.body) > 1 or rng.random() < 0.5)
        )
        if (bug := _bug(admitted, rng, subtle=hard)) is not None:
            break
    admitted_programs = draw_admitted_programs(rng, split, 3 if hard else 2, [admitted])
    module, name = Module(rng.choice(MODULES), tuple(admitted_programs)), admitted.program.name
    path, test, first = module.path, f"test_{module.name}.py", module.first_line(name)
    thought = f"test_{name} fails.\n{first + 1}|{admitted.program.signature}\n"
    oracle = (
        call("shell", command=CHECK),  # the failing test names the function
        call("read_file", path=path),
        correct(path, first + bug.line, bug.new, bug.old, thought=thought),
        call("submit"),
    )
    return edited(
        admitted.program, path, prompt=rng.choice(REPAIR).format(path=path, test=test, name=name),
        hidden=cases_of(admitted), oracle=oracle, tools=REPAIR_TOOLS, check=CHECK, limits=USUAL,
        files={path: module.source({name: bug}), test: _tests(module.name, admitted_programs)},
    )  # fmt: skip


def make_fix_again(rng: random.Random, split: Split, level: int) -> Made:
    """`fix`, with an oracle that edits in vain first."""
    return _in_vain_first(make_fix(rng, split, level), rng)


def make_repair_again(rng: random.Random, split: Split, level: int) -> Made:
    """`repair`, with an oracle that edits in vain first."""
    return _in_vain_first(make_repair(rng, split, level), rng)


def _in_vain_first(made: Made, rng: random.Random) -> Made:
    """Before its edit, the oracle copies a line of the function as it is, up to three times, which the tool
    refuses: the commonest mistake of a small model, and the commonest after it is to say the same again. What
    is refused is shown and not imitated, what follows it is learned."""
    at = next(i for i, action in enumerate(made.oracle) if action.name == "edit_file")
    edit = made.oracle[at]
    path, line = str(edit.arguments["path"]), int(str(edit.arguments["line"]))
    lines = made.files[path].split("\n")
    others = [n for n in _body_around(lines, line) if n != line]
    before = edit.thought.partition("Wrong:")[0]
    vain: list[OracleAction] = []
    for _ in range(rng.choice(_TIMES_IN_VAIN)):
        if vain and rng.random() < 0.5:
            vain.append(vain[-1])
            continue
        copied = rng.choice(others) if others and rng.random() < 0.7 else line
        text = lines[copied - 1]
        vain.append(correct(path, copied, text, text, thought=before))
    return replace(made, oracle=(*made.oracle[:at], *vain, *made.oracle[at:]), limits=_IN_VAIN)


def _body_around(lines: list[str], line: int) -> list[int]:
    """The numbers of the lines of code in the function that a line of its body belongs to."""
    start = next(n for n in range(line, 0, -1) if lines[n - 1].startswith("def "))
    end = next((n for n in range(line, len(lines) + 1) if not lines[n - 1].strip()), len(lines) + 1)
    return [n for n in range(start + 1, end) if '"""' not in lines[n - 1]]


def make_body(rng: random.Random, split: Split, level: int) -> Made:
    """The docstring is there, the one-line body is not."""
    admitted = draw_admitted(rng, split, lambda p: len(p.body) == 1 and len(p.body_lines[0]) < 90)
    program, path = admitted.program, f"{rng.choice(MODULES)}.py"
    case = rng.choice(admitted.examples)
    text = f'{program.signature}\n    """{program.doc}"""\n    {rng.choice(PLACEHOLDERS)}\n'
    said = {"call": call_text(program.name, case), "expected": repr(case.expected)}
    return edited(
        program, path, call("edit_file", path=path, line=3, new=program.body_lines[0]),
        prompt=rng.choice(BODY).format(name=program.name, path=path, **said), files={path: text},
        tools=FILE_TOOLS, hidden=cases_of(admitted), limits=USUAL,
    )  # fmt: skip
