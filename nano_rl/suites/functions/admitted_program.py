"""A program admitted as a task: its examples, its hidden cases, and the mutants that they kill.

Admission asks that the function returns plain values on its whole domain, is neither constant nor the
identity, and that the hidden cases kill at least nine of ten mutants that any of 160 inputs tells apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from nano_rl.suites.functions.program import Program, compile_function, outcome, sample_args
from nano_rl.tasks.mutate import Mutant, mutants
from nano_shared.hashing import canonical_json
from nano_shared.types import Case

HIDDEN = 10
MAX_HIDDEN = 20
POOL = 160
KILLED = 0.9
MAX_SIZE = 160
"""characters of a result as JSON"""


@dataclass(frozen=True, slots=True)
class Study:
    """A program with what is known about it."""

    program: Program
    examples: tuple[Case, ...]
    """may be shown; disjoint from `hidden`"""
    hidden: tuple[Case, ...]
    bugs: tuple[Mutant, ...]
    """mutants that the hidden cases kill; lines count from the signature, the docstring included"""


@dataclass(frozen=True, slots=True)
class Probe:
    """An input and what the reference returns for it."""

    args: list[Any]
    value: Any

    @property
    def case(self) -> Case:
        return Case(args=self.args, expected=self.value)


def _probes(
    program: Program, rng: random.Random, count: int, seen: set[str], *, wide: bool
) -> list[Probe] | None:
    """Distinct inputs with their results; None where the reference fails on one."""
    function = compile_function(program.source(), program.name)
    found: list[Probe] = []
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
        found.append(Probe(args, value))
    return found


def _dull(probes: list[Probe], *, boolean: bool) -> bool:
    """Constant, nearly constant, or the identity."""
    values = [canonical_json(p.value) for p in probes]
    if len(set(values)) < (2 if boolean else 3):
        return True
    if max(values.count(v) for v in set(values)) > (0.85 if boolean else 0.6) * len(values):
        return True
    return all(any(type(a) is type(p.value) and a == p.value for a in p.args) for p in probes)


def _kills(mutant: Mutant, program: Program, probe: Probe) -> bool:
    function = compile_function(mutant.source, program.name)
    return outcome(function, probe.args) != ("value", probe.value)


def _tells(mutant: Mutant, program: Program, probes: list[Probe]) -> int | None:
    """Index of the first probe that the mutant fails."""
    function = compile_function(mutant.source, program.name)
    for index, probe in enumerate(probes):
        what, value = outcome(function, probe.args)
        if what == "raise" or type(value) is not type(probe.value) or value != probe.value:
            return index
    return None


def _extend(program: Program, hidden: list[Probe], pool: list[Probe]) -> list[Mutant] | None:
    """Add inputs of the pool to `hidden` until the mutants die; the killed ones, or None for too few."""
    killed, left = [], []
    for mutant in mutants(program.source()):
        (left if _tells(mutant, program, hidden) is None else killed).append(mutant)
    missed = 0
    for mutant in left:
        index = _tells(mutant, program, hidden)
        if index is None:
            index = _tells(mutant, program, pool)
            if index is None:
                continue  # equivalent as far as 160 inputs can tell
            if len(hidden) >= MAX_HIDDEN:
                missed += 1
                continue
            hidden.append(pool.pop(index))
        killed.append(mutant)
    return killed if killed and missed <= (1 - KILLED) * (len(killed) + missed) else None


def study(program: Program, rng: random.Random, *, examples: int = 4) -> Study | None:
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
    if bugs is None:
        return None
    return Study(program, tuple(p.case for p in shown), tuple(p.case for p in hidden), tuple(bugs))
