"""Modules of several functions with a top function that calls them all, so that its cases check each."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nano_rl.tasks.mutate import Mutant
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.types import Split
from nano_suites.functions.admitted_program import AdmittedProgram, claim, draw_admitted, failing
from nano_suites.functions.program import Program, compile_function, outcome

TOPS = ("overview", "summary", "report_all", "collect_results", "run_all", "dashboard")


@dataclass(frozen=True, slots=True)
class Module:
    """One file of functions."""

    name: str
    admitted_programs: tuple[AdmittedProgram, ...]

    @property
    def path(self) -> str:
        return f"{self.name}.py"

    def source(self, bugs: Mapping[str, Mutant] | None = None, top: str = "") -> str:
        """Its text, with the mutants of `bugs` (by function) in place, and `top` below."""
        parts = [
            (bugs or {})[s.program.name].source if s.program.name in (bugs or {}) else s.program.source()
            for s in self.admitted_programs
        ]
        return "\n\n".join([*parts, *([top] if top else [])])

    def first_line(self, name: str) -> int:
        """Lines of the file above the function's signature."""
        above = 0
        for admitted in self.admitted_programs:
            if admitted.program.name == name:
                return above
            above += admitted.program.source().count("\n") + 2
        raise KeyError(name)


def draw_admitted_programs(
    rng: random.Random, split: Split, count: int, first: Sequence[AdmittedProgram] = ()
) -> list[AdmittedProgram]:
    """Studies of short programs with distinct names, `first` among them, in a drawn order."""
    admitted_programs = list(first)
    while len(admitted_programs) < count:
        admitted = draw_admitted(rng, split, is_short)
        if admitted.program.name not in {s.program.name for s in admitted_programs}:
            admitted_programs.append(admitted)
    rng.shuffle(admitted_programs)
    return admitted_programs


def is_short(program: Program) -> bool:
    return len(program.body) <= 6 and max(map(len, program.body_lines)) < 90


def has_blocks(program: Program) -> bool:
    """Two to six lines with a loop or a branch."""
    blocks = any(line.lstrip().startswith(("for ", "while ", "if ")) for line in program.body)
    return blocks and len(program.body) > 1 and is_short(program)


@dataclass(frozen=True, slots=True)
class Top:
    """A function that lists what others return."""

    name: str
    source: str
    cases: tuple[Case, ...]

    @property
    def hidden(self) -> CaseChecks:
        return CaseChecks(entry_point=self.name, cases=self.cases)


def top_of(admitted_programs: Sequence[AdmittedProgram], rng: random.Random) -> Top:
    """The function that calls all of the programs, with cases that cover every hidden case of each."""
    taken = {s.program.name for s in admitted_programs}
    name = rng.choice([n for n in TOPS if n not in taken])
    params: list[str] = []
    calls: list[str] = []
    for admitted in admitted_programs:
        own = []
        for param in admitted.program.params:
            free = param.name
            number = 2
            while free in params or free in taken or free == name:
                free, number = f"{param.name}{number}", number + 1
            params.append(free)
            own.append(free)
        calls.append(f"{admitted.program.name}({', '.join(own)})")
    told = ", ".join(s.program.name for s in admitted_programs)
    lines = [
        f"def {name}({', '.join(params)}):",
        f'    """List the results of {told}, in this order."""',
        "    return [",
        *(f"        {call}," for call in calls),
        "    ]",
    ]
    cases = []
    for index in range(max(len(s.hidden) for s in admitted_programs)):
        parts = [s.hidden[index % len(s.hidden)] for s in admitted_programs]
        cases.append(Case(args=[a for p in parts for a in p.args], expected=[p.expected for p in parts]))
    return Top(name, "\n".join(lines) + "\n", tuple(cases))


def imports_of(modules: Sequence[Module]) -> str:
    """Import lines for every function of the modules."""
    return "".join(
        f"from {m.name} import {', '.join(sorted(s.program.name for s in m.admitted_programs))}\n"
        for m in modules
    )


def assertions_of(modules: Sequence[Module], shown: int = 2) -> str:
    """Plain assertions over the first examples of every function; Python alone runs them."""
    lines = [imports_of(modules)]
    for admitted in (s for m in modules for s in m.admitted_programs):
        for case in admitted.examples[:shown]:
            said = claim(admitted.program.name, case)
            lines.append(f"assert {said}\n")
    return "".join([*lines, 'print("passed")\n'])


def runs(admitted: AdmittedProgram, bug: Mutant, shown: int) -> bool:
    """Whether the mutant ends on every example and fails one of the first `shown`."""
    return ends(admitted, bug) and any(failing(admitted, bug.source, admitted.examples[:shown]))


def ends(admitted: AdmittedProgram, bug: Mutant) -> bool:
    """Whether the mutant ends on every example and hidden case: tests of one that does not are never over."""
    function = compile_function(bug.source, admitted.program.name)
    found = [outcome(function, c.args) for c in (*admitted.examples, *admitted.hidden)]
    return ("raise", "OutOfSteps") not in found and ("raise", "MemoryError") not in found


def draw_bug(
    admitted: AdmittedProgram, rng: random.Random, *, shown: int = 2, kinds: Sequence[str] = ()
) -> Mutant | None:
    """A mutant that the shown examples fail, of a drawn kind; None where there is none."""
    bugs = [m for m in admitted.bugs if (not kinds or m.kind in kinds) and runs(admitted, m, shown)]
    found = sorted({m.kind for m in bugs})
    if not found:
        return None
    kind = rng.choice(found)
    return rng.choice([m for m in bugs if m.kind == kind])
