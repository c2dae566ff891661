"""Hidden and visible cases of a program: by execution, extended until they kill its mutants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from nano_rl.tasks.mutate import Mutant, mutants
from nano_rl.tasks.program import Program, compiled
from nano_shared.types import Case

_FIRST, _MOST = 8, 24
KILL_RATE = 0.9


def visible_cases(program: Program, random: Random, n: int) -> list[Case]:
    function = compiled(program.source(), program.name)
    return [_case(function, program.sample_arguments(random)) for _ in range(n)]


def hidden_cases(program: Program, random: Random) -> list[Case] | None:
    """Cases that kill at least 90 % of all single-token mutants, or None where 24 do not."""
    function = compiled(program.source(), program.name)
    cases = [_case(function, program.sample_arguments(random, wide=True)) for _ in range(_FIRST)]
    alive = survivors(program, list(mutants(program)), cases)
    total = max(1, sum(1 for _ in mutants(program)))
    while len(alive) > (1 - KILL_RATE) * total:
        if len(cases) >= _MOST:
            return None
        new = _case(function, program.sample_arguments(random, wide=len(cases) % 2 == 0))
        cases.append(new)
        alive = survivors(program, alive, [new])
    return cases


def survivors(program: Program, candidates: Sequence[Mutant], cases: Sequence[Case]) -> list[Mutant]:
    """Mutants that give the expected value in every case."""
    return [m for m in candidates if passes(program.source(m.body), program.name, cases)]


def passes(source: str, name: str, cases: Sequence[Case]) -> bool:
    """Whether a program of our own grammar gives every expected value."""
    try:
        function = compiled(source, name)
        return all(function(*_copy(case.args)) == case.expected for case in cases)
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        SyntaxError,
        NameError,
        MemoryError,
    ):
        return False


def _case(function: Callable[..., Any], arguments: list[Any]) -> Case:
    return Case(args=arguments, expected=function(*_copy(arguments)))


def _copy(arguments: Sequence[Any]) -> list[Any]:
    return [list(a) if isinstance(a, list) else a for a in arguments]
