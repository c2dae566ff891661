"""Task views: the same programs shown as literals to copy, values to predict, lines to fix or to write."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from nano_rl.tasks.grammar import VERSION, draw_study, split_of
from nano_rl.tasks.literals import draw_copy, draw_emit, draw_sum
from nano_rl.tasks.mutate import Mutant
from nano_rl.tasks.phrases import BODY, COMPLETE, COPY, EMIT, FIX, PREDICT, REPAIR, SUMS
from nano_rl.tasks.program import Program, compile_function, outcome
from nano_rl.tasks.study import Study
from nano_shared.types import Case, HiddenChecks, Limits, Provenance, Split, Task, ToolCall

SHORT = Limits(max_turns=4, max_tokens=256)
USUAL = Limits(max_turns=8, max_tokens=768)
CHECK = "python -m pytest -q"
FILE_TOOLS = ("read_file", "edit_file", "submit")
REPAIR_TOOLS = ("read_file", "edit_file", "shell", "submit")
_MODULES = """
stats tools numbers_lib lists shapes report ledger score parsing textkit sequence basics counts series names
labels filters totals measure pipeline records metrics words digits math_ops catalog summary
"""
MODULES = tuple(_MODULES.split())


@dataclass(frozen=True, slots=True)
class View:
    """A way to make a task of one level."""

    name: str
    level: int
    make: Callable[[random.Random, Split, int], Made]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a view fills in of a task."""

    prompt: str
    family: str
    program_hash: str
    hidden: HiddenChecks
    oracle: tuple[ToolCall, ...]
    tools: tuple[str, ...]
    files: dict[str, str]
    artifacts: tuple[str, ...] = ()
    check: str | None = None
    limits: Limits = SHORT


def call(name: str, **arguments: str | int) -> ToolCall:
    return ToolCall(name=name, arguments=dict(arguments))


def call_text(name: str, case: Case) -> str:
    return f"{name}({', '.join(repr(a) for a in case.args)})"


def _claim(name: str, case: Case) -> str:
    """What a case says, as an expression that is true."""
    return f"{call_text(name, case)} {'is' if isinstance(case.expected, bool) else '=='} {case.expected!r}"


def numbered(text: str) -> str:
    """The text as read_file shows it."""
    return "\n".join(f"{n}|{line}" for n, line in enumerate(text.rstrip("\n").split("\n"), start=1))


def _cases(study: Study) -> HiddenChecks:
    return HiddenChecks(kind="cases", entry_point=study.program.name, cases=study.hidden)


# ---------------------------------------------------------------------------------------------- level 0


def make_copy(rng: random.Random, split: Split, level: int) -> Made:
    """The prompt assigns a few names; submit the value of one."""
    while split_of((drawn := draw_copy(rng)).family) is not split:
        pass
    prompt = rng.choice(COPY).format(code=drawn.code, name=drawn.asked)
    return Made(
        prompt=prompt,
        family=drawn.family,
        program_hash=drawn.hash,
        files={},
        tools=("submit",),
        hidden=HiddenChecks(kind="answer", answer=drawn.answer),
        oracle=(call("submit", answer=drawn.answer),),
    )


def make_emit(rng: random.Random, split: Split, level: int) -> Made:
    """Write a given small function to a file."""
    if rng.random() < 0.7:
        return _emit_program(rng, split)
    while split_of((drawn := draw_emit(rng)).family) is not split:
        pass
    prompt = rng.choice(EMIT).format(code=drawn.code.rstrip("\n"), path=drawn.asked)
    cases = (Case(args=[], expected=drawn.value),)
    return Made(
        prompt=prompt,
        family=drawn.family,
        program_hash=drawn.hash,
        files={},
        artifacts=(drawn.asked,),
        tools=("write_file", "submit"),
        hidden=HiddenChecks(kind="cases", entry_point=drawn.answer, cases=cases),
        oracle=(call("write_file", path=drawn.asked, content=drawn.code), call("submit")),
    )


def _emit_program(rng: random.Random, split: Split) -> Made:
    study = draw_study(rng, split, lambda p: len(p.body) == 1 and len(p.source(doc=False)) < 75)
    program, path = study.program, f"{rng.choice(MODULES)}.py"
    text = program.source(doc=False)
    return Made(
        prompt=rng.choice(EMIT).format(code=text.rstrip("\n"), path=path),
        family=program.family,
        program_hash=program.hash,
        files={},
        artifacts=(path,),
        tools=("write_file", "submit"),
        hidden=_cases(study),
        oracle=(call("write_file", path=path, content=text), call("submit")),
    )


# ---------------------------------------------------------------------------------------------- level 1


def make_calculate(rng: random.Random, split: Split, level: int) -> Made:
    """A question of arithmetic, for the tool calculate."""
    while split_of((drawn := draw_sum(rng)).family) is not split:
        pass
    return Made(
        prompt=rng.choice(SUMS).format(q=drawn.asked),
        family=drawn.family,
        program_hash=drawn.hash,
        files={},
        tools=("calculate", "submit"),
        hidden=HiddenChecks(kind="answer", answer=drawn.answer),
        oracle=(call("calculate", expression=drawn.code), call("submit", answer=drawn.answer)),
    )


def make_predict(rng: random.Random, split: Split, level: int) -> Made:
    """Predict what a call returns."""
    study = draw_study(rng, split, lambda p: len(p.body) <= 2 and len(p.source(doc=False)) < 120)
    case = rng.choice([c for c in (*study.examples, *study.hidden) if len(repr(c.expected)) < 30])
    prompt = rng.choice(PREDICT).format(
        code=study.program.source(doc=False).rstrip("\n"), call=call_text(study.program.name, case)
    )
    answer = repr(case.expected)
    return Made(
        prompt=prompt,
        family=study.program.family,
        program_hash=study.program.hash,
        files={},
        tools=("submit",),
        hidden=HiddenChecks(kind="answer", answer=answer),
        oracle=(call("submit", answer=answer),),
    )


_HOLE = re.compile(r" (\+|-|\*|//|%|<=|>=|<|>|==|!=|and|or) ")
_ALIKE = (("+", "-", "*", "//", "%"), ("<", "<=", ">", ">=", "==", "!="), ("and", "or"))


def _holes(program: Program) -> list[tuple[str, str]]:
    """Every (body line with `?` for one operator, operator) of a one-line body."""
    line = program.body_lines[-1]
    return [(f"{line[: m.start()]} ? {line[m.end() :]}", m.group(1)) for m in _HOLE.finditer(line)]


def _settles(study: Study, holed: str, operator: str, cases: tuple[Case, ...]) -> bool:
    """Whether the cases fail with every other operator in the hole."""
    program = study.program
    for other in next(group for group in _ALIKE if operator in group):
        if other == operator:
            continue
        source = f"{program.signature}\n{holed.replace(' ? ', f' {other} ')}\n"
        function = compile_function(source, program.name)
        if all(outcome(function, c.args) == ("value", c.expected) for c in cases):
            return False
    return True


def make_complete(rng: random.Random, split: Split, level: int) -> Made:
    """A function whose operator is `?`, shown with two examples that settle it."""
    while True:
        study = draw_study(rng, split, lambda p: len(p.body) == 1 and len(p.source(doc=False)) < 110)
        program = study.program
        holes = _holes(program)
        shown = tuple(sorted(study.examples, key=lambda c: len(repr(c.args) + repr(c.expected)))[-3:-1])
        holes = [h for h in holes if _settles(study, *h, shown)]
        if holes and sum(len(repr(c.args)) for c in shown) < 80:
            break
    holed, _ = rng.choice(holes)
    path, line = f"{rng.choice(MODULES)}.py", 2
    text = f"{program.signature}\n{holed}\n"
    examples = "\n".join(_claim(program.name, c) for c in shown)
    return Made(
        prompt=rng.choice(COMPLETE).format(path=path, code=numbered(text), examples=examples),
        family=program.family,
        program_hash=program.hash,
        files={path: text},
        artifacts=(path,),
        tools=("edit_file", "submit"),
        hidden=_cases(study),
        oracle=(call("edit_file", path=path, line=line, new=program.body_lines[0]), call("submit")),
    )


# ------------------------------------------------------------------------------------------ levels 2, 3

_SUBTLE = ("constant", "variable", "flag", "step")


def _bug(study: Study, rng: random.Random, *, subtle: bool) -> Mutant | None:
    """A mutant that an example shows; subtle ones are off by one, at a boundary or read another name."""
    bugs = [m for m in study.bugs if _shows(m, study)]
    hard = [m for m in bugs if m.kind in _SUBTLE or (m.kind == "comparison" and len(m.new) != len(m.old))]
    if subtle and hard:
        bugs = hard
    kinds = sorted({m.kind for m in bugs})
    if not kinds:
        return None
    kind = rng.choice(kinds)
    return rng.choice([m for m in bugs if m.kind == kind])


def _shows(mutant: Mutant, study: Study) -> bool:
    function = compile_function(mutant.source, study.program.name)
    return any(outcome(function, c.args) != ("value", c.expected) for c in study.examples)


def _fits_fix(program: Program) -> bool:
    return len(program.body) <= 6 and max(map(len, program.body_lines)) < 90


def make_fix(rng: random.Random, split: Split, level: int) -> Made:
    """One line is wrong against the docstring; the file must be read first."""
    while True:
        study = draw_study(rng, split, _fits_fix)
        if (bug := _bug(study, rng, subtle=False)) is not None:
            break
    program, path = study.program, f"{rng.choice(MODULES)}.py"
    failing = [c for c in study.examples if _fails(bug, program, c)]
    case = rng.choice(failing)
    prompt = rng.choice(FIX).format(
        name=program.name, path=path, call=call_text(program.name, case), expected=repr(case.expected)
    )
    oracle = (
        call("read_file", path=path),
        call("edit_file", path=path, line=bug.line, new=bug.old),
        call("submit"),
    )
    return Made(
        prompt=prompt,
        family=program.family,
        program_hash=program.hash,
        files={path: bug.source},
        artifacts=(path,),
        tools=FILE_TOOLS,
        hidden=_cases(study),
        oracle=oracle,
        limits=USUAL,
    )


def _fails(bug: Mutant, program: Program, case: Case) -> bool:
    return outcome(compile_function(bug.source, program.name), case.args) != ("value", case.expected)


def _tests(module: str, studies: list[Study], rng: random.Random) -> str:
    """A pytest file with two or three examples a function."""
    names = ", ".join(s.program.name for s in studies)
    blocks = [f"from {module} import {names}\n"]
    for study in studies:
        name = study.program.name
        lines = [f"    assert {_claim(name, c)}" for c in study.examples]
        blocks.append(f"\n\ndef test_{name}():\n" + "\n".join(lines) + "\n")
    return "".join(blocks)


def make_repair(rng: random.Random, split: Split, level: int) -> Made:
    """A module of two or three functions, one of them buggy, with tests that fail."""
    hard = level >= 3
    while True:
        study = draw_study(
            rng, split, lambda p: _fits_fix(p) and (not hard or len(p.body) > 1 or rng.random() < 0.5)
        )
        if (bug := _bug(study, rng, subtle=hard)) is not None:
            break
    studies = [study]
    while len(studies) < (3 if hard else 2):
        other = draw_study(rng, split, _fits_fix)
        if other.program.name not in {s.program.name for s in studies}:
            studies.append(other)
    rng.shuffle(studies)
    module = rng.choice(MODULES)
    path, first, parts = f"{module}.py", 0, []
    for one in studies:
        if one is study:
            first = sum(part.count("\n") for part in parts) + 2 * len(parts)
        parts.append(bug.source if one is study else one.program.source())
    test_path = f"test_{module}.py"
    run = (call("shell", command=CHECK),) if rng.random() < 1 / 3 else ()
    line = first + bug.line
    oracle = (
        call("read_file", path=path),
        call("edit_file", path=path, line=line, new=bug.old),
        *run,
        call("submit"),
    )
    return Made(
        prompt=rng.choice(REPAIR).format(path=path, test=test_path, name=study.program.name),
        family=study.program.family,
        program_hash=study.program.hash,
        hidden=_cases(study),
        oracle=oracle,
        files={path: "\n\n".join(parts), test_path: _tests(module, studies, rng)},
        artifacts=(path,),
        tools=REPAIR_TOOLS,
        check=CHECK,
        limits=USUAL,
    )


def make_body(rng: random.Random, split: Split, level: int) -> Made:
    """The docstring is there, the one-line body is not."""
    study = draw_study(rng, split, lambda p: len(p.body) == 1 and len(p.body_lines[0]) < 90)
    program, path = study.program, f"{rng.choice(MODULES)}.py"
    case = rng.choice(study.examples)
    head = f'{program.signature}\n    """{program.doc}"""\n'
    text = head + rng.choice(
        ("    pass\n", "    ...\n", "    return None\n", "    raise NotImplementedError\n")
    )
    prompt = rng.choice(BODY).format(
        name=program.name, path=path, call=call_text(program.name, case), expected=repr(case.expected)
    )
    return Made(
        prompt=prompt,
        family=program.family,
        program_hash=program.hash,
        files={path: text},
        artifacts=(path,),
        tools=FILE_TOOLS,
        hidden=_cases(study),
        limits=USUAL,
        oracle=(
            call("read_file", path=path),
            call("edit_file", path=path, line=3, new=program.body_lines[0]),
            call("submit"),
        ),
    )


VIEWS = (
    View("copy", 0, make_copy),
    View("emit", 0, make_emit),
    View("complete", 1, make_complete),
    View("calculate", 1, make_calculate),
    View("predict", 1, make_predict),
    View("fix", 2, make_fix),
    View("repair", 2, make_repair),
    View("body", 3, make_body),
    View("repair", 3, make_repair),
)


def make_task(view: View, split: Split, seed: int) -> Task:
    """The task of one view, split and seed; the same ones always make the same task."""
    rng = random.Random(f"{VERSION}:{view.name}:{view.level}:{split}:{seed}")
    made = view.make(rng, split, view.level)
    return Task(
        key=f"functions-{VERSION}:L{view.level}:{view.name}:{made.family}:{split}-{seed}",
        prompt=made.prompt,
        files=made.files,
        artifacts=made.artifacts,
        tools=made.tools,
        limits=made.limits,
        check=made.check,
        hidden=made.hidden,
        oracle=made.oracle,
        split=split,
        level=view.level,
        family=made.family,
        view=view.name,
        program_hash=made.program_hash,
        provenance=Provenance(source="generated", generator=f"nano_rl.tasks {VERSION}", seed=seed),
    )
