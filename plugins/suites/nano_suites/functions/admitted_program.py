"""Programs of the grammars, admitted as tasks: their examples, hidden cases, and the mutants that these kill.

Admission asks that the function returns plain values on its whole domain, is neither constant nor the
identity, and that the hidden cases kill at least nine of ten mutants that any of 160 inputs tells apart.
"""

from __future__ import annotations

import builtins
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

from nano_rl.tasks.mutate import Mutant, mutants
from nano_rl.tasks.suite import Made, split_of
from nano_shared.files import canonical_json
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.types import Limits, OracleAction, Split
from nano_suites.functions.arithmetic import draw_arithmetic
from nano_suites.functions.classics import draw_classic
from nano_suites.functions.numbers import draw_numbers
from nano_suites.functions.program import Program, compile_function, outcome, sample_args, skeleton
from nano_suites.functions.texts import draw_texts

HIDDEN = 10
MAX_HIDDEN = 20
POOL = 160
KILLED = 0.9
MAX_SIZE = 160
"""characters of a result as JSON"""


@dataclass(frozen=True, slots=True)
class AdmittedProgram:
    """A program with what is known about it."""

    program: Program
    examples: tuple[Case, ...]
    """may be shown; disjoint from `hidden`"""
    hidden: tuple[Case, ...]
    bugs: tuple[Mutant, ...]
    """mutants that the hidden cases kill; lines count from the signature, the docstring included"""


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """An input and what the reference returns for it."""

    args: list[Any]
    value: Any

    @property
    def case(self) -> Case:
        return Case(args=self.args, expected=self.value)


def _probes(
    program: Program, rng: random.Random, count: int, seen: set[str], *, wide: bool
) -> list[ProbeCall] | None:
    """Distinct inputs with their results; None where the reference fails on one."""
    function = compile_function(program.source(), program.name)
    found: list[ProbeCall] = []
    for _ in range(count * 4):
        if len(found) == count:
            break
        args = sample_args(program, rng, wide=wide)
        if (key := canonical_json(args)) in seen:
            continue
        seen.add(key)
        what, value = outcome(function, args)
        if what == "raise" or len(canonical_json(value)) > MAX_SIZE:
            return None
        found.append(ProbeCall(args, value))
    return found


def _dull(probes: list[ProbeCall], *, boolean: bool) -> bool:
    """Constant, nearly constant, or the identity."""
    values = [canonical_json(p.value) for p in probes]
    if len(set(values)) < (2 if boolean else 3):
        return True
    if max(values.count(v) for v in set(values)) > (0.85 if boolean else 0.6) * len(values):
        return True
    return all(any(type(a) is type(p.value) and a == p.value for a in p.args) for p in probes)


def _tells(mutant: Mutant, program: Program, probes: list[ProbeCall]) -> int | None:
    """Index of the first probe that the mutant fails."""
    function = compile_function(mutant.source, program.name)
    for index, probe in enumerate(probes):
        what, value = outcome(function, probe.args)
        if what == "raise" or type(value) is not type(probe.value) or value != probe.value:
            return index
    return None


def _extend(program: Program, hidden: list[ProbeCall], pool: list[ProbeCall]) -> list[Mutant] | None:
    """Add inputs of the pool to `hidden` until the mutants die; the killed ones, or None for too few."""
    killed, left = [], []
    for mutant in mutants(program.source()):
        (left if _tells(mutant, program, hidden) is None else killed).append(mutant)
    missed = 0
    for mutant in left:
        index = _tells(mutant, program, hidden)
        if index is None:
            if (index := _tells(mutant, program, pool)) is None:
                continue  # equivalent as far as 160 inputs can tell
            if len(hidden) >= MAX_HIDDEN:
                missed += 1
                continue
            hidden.append(pool.pop(index))
        killed.append(mutant)
    return killed if killed and missed <= (1 - KILLED) * (len(killed) + missed) else None


def admit_program(program: Program, rng: random.Random, *, examples: int = 4) -> AdmittedProgram | None:
    """The program's examples, hidden cases and bugs; None where it is not fit for a task."""
    seen: set[str] = set()
    shown = _probes(program, rng, examples, seen, wide=False)
    if shown is None or len(shown) < min(examples, 2):
        return None
    hidden = _probes(program, rng, HIDDEN, seen, wide=True)
    if hidden is None or len(hidden) < 8 or _dull(hidden, boolean=isinstance(hidden[0].value, bool)):
        return None
    pool = _probes(program, rng, POOL, seen, wide=True)
    if pool is None or len({canonical_json(p.value) for p in (*hidden, *shown)}) < 2:
        return None
    bugs = _extend(program, hidden, pool)
    examples_of, hidden_of = (tuple(p.case for p in probes) for probes in (shown, hidden))
    return None if bugs is None else AdmittedProgram(program, examples_of, hidden_of, tuple(bugs))


def failing(admitted: AdmittedProgram, source: str, cases: Sequence[Case] | None = None) -> Iterator[Case]:
    """The cases, by default the examples, on which another source of the program has another outcome."""
    function = compile_function(source, admitted.program.name)
    for case in admitted.examples if cases is None else cases:
        if outcome(function, case.args) != ("value", case.expected):
            yield case


BRIEF = Limits(max_turns=3, max_tokens=96)
SHORT = Limits(max_turns=4, max_tokens=256)
USUAL = Limits(max_turns=8, max_tokens=768)
LONG = Limits(max_turns=16, max_tokens=2048)
CHECK = "python -m pytest -q"
FILE_TOOLS = ("read_file", "edit_file", "submit")
REPAIR_TOOLS = ("read_file", "edit_file", "shell", "submit")
WRITE_TOOLS = ("read_file", "edit_file", "write_file", "shell", "submit")
SEARCH_TOOLS = ("search", "read_file", "edit_file", "shell", "submit")
_MODULES = """
stats tools numbers_lib lists shapes report ledger score parsing textkit sequence basics counts series names
labels filters totals measure pipeline records metrics words digits math_ops catalog summary
"""
MODULES = tuple(_MODULES.split())


def call(name: str, **arguments: str | int) -> OracleAction:
    return OracleAction(name=name, arguments=dict(arguments))


def correct(path: str, line: int, wrong: str, right: str, *, thought: str = "") -> OracleAction:
    """Replace a line, once it has been quoted as read_file shows it: a small model finds it by copying."""
    quoted = f"{thought}Wrong:\n{line}|{wrong}"
    return call("edit_file", path=path, line=line, new=right).model_copy(update={"thought": quoted})


def call_text(name: str, case: Case) -> str:
    return f"{name}({', '.join(repr(a) for a in case.args)})"


def claim(name: str, case: Case) -> str:
    """What a case says, as an expression that is true."""
    return f"{call_text(name, case)} {'is' if isinstance(case.expected, bool) else '=='} {case.expected!r}"


def numbered(text: str) -> str:
    """The text as read_file shows it."""
    return "\n".join(f"{n}|{line}" for n, line in enumerate(text.rstrip("\n").split("\n"), start=1))


def check_of(module: str) -> str:
    """The shell line that runs a module's plain assertions."""
    return f"python test_{module}.py"


def made_of(program: Any, **fields: Any) -> Made:
    """A task of a program, or of a question that was made of one: of its family and with its hash."""
    return Made(program=(program.family, program.hash), **fields)


def edited(program: Any, path: str, *steps: OracleAction, check: str | None = None, **fields: Any) -> Made:
    """A task about the file `path`: its oracle reads it, takes the steps, runs the check and submits."""
    checked = (call("shell", command=check),) if check else ()
    oracle = (call("read_file", path=path), *steps, *checked, call("submit"))
    return made_of(program, **{"artifacts": (path,), "check": check, "oracle": oracle} | fields)


def cases_of(admitted: AdmittedProgram) -> CaseChecks:
    return CaseChecks(entry_point=admitted.program.name, cases=admitted.hidden)


VERSION = "2"
"""of the generator: the same key makes the same task only under the same version"""
DRAWS = (draw_numbers, draw_numbers, draw_numbers, draw_texts, draw_texts, draw_texts, draw_arithmetic,
         draw_arithmetic, draw_classic)  # fmt: skip


def belongs(family: str, source: str, split: Split) -> bool:
    """Whether a program is of the split by its family and by the skeleton of its code. Two families may meet
    in one code (a sum of squares, a sum of products of a number with itself); asking both keeps equal code
    out of the other split, and costs each split some programs."""
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
    name = f"{program.name}_{rng.choice(('of', 'from', 'in'))}_{program.params[0].name}"
    return replace(program, name=name)


def draw_admitted(
    rng: random.Random,
    split: Split,
    fits: Callable[[Program], bool] = lambda program: True,
    draw: Callable[[random.Random], Program] = draw_program,
) -> AdmittedProgram:
    """The first admitted program of the split that `fits`."""
    while True:
        program = draw(rng)
        if (
            split_of(program.family) is split
            and fits(program)
            and belongs(program.family, program.source(doc=False), split)
            and max(len(line) for line in program.lines()) <= 110
            and (found := admit_program(program, rng)) is not None
        ):
            return found
