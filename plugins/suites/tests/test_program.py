"""What a generated program promises: it runs, says what it does, and belongs to one split."""

from __future__ import annotations

import ast
import builtins
import random
import re

import pytest

from nano_rl.tasks.suite import split_of
from nano_shared.files import canonical_json
from nano_shared.types import Split
from nano_suites.functions.admitted_program import admit_program, draw_admitted, draw_program, renamed
from nano_suites.functions.classics import CLASSICS, draw_classic
from nano_suites.functions.program import (
    OutOfSteps,
    Param,
    Program,
    ValueKind,
    compile_function,
    outcome,
    program_hash,
    sample_args,
)

DRAWN = [draw_program(random.Random(seed)) for seed in range(400)]


def _program(*body: str, doc: str = "Do something.") -> Program:
    xs = Param(name="xs", kind=ValueKind.INTS)
    return Program(name="f", params=(xs,), returns=ValueKind.INT, doc=doc, body=body, family="test.f")


def test_a_seed_always_draws_the_same_program() -> None:
    assert [draw_program(random.Random(seed)) for seed in range(400)] == DRAWN


def test_sources_are_one_function_with_a_one_line_docstring() -> None:
    for program in DRAWN:
        (function,) = ast.parse(program.source()).body
        assert isinstance(function, ast.FunctionDef)
        assert function.name == program.name
        assert ast.get_docstring(function) == program.doc
        assert program.doc.endswith(".")
        assert program.doc[0].isupper()


def test_the_docstring_names_every_parameter() -> None:
    for program in DRAWN:
        for param in program.params:
            assert re.search(rf"\b{param.name}\b", program.doc), program.source()


def test_no_name_hides_a_builtin() -> None:
    assert not {p.name for p in DRAWN} & set(dir(builtins))


def test_programs_return_their_declared_kind_of_value() -> None:
    kinds = {
        ValueKind.INT: int,
        ValueKind.BOOL: bool,
        ValueKind.STR: str,
        ValueKind.INTS: list,
        ValueKind.STRS: list,
    }
    for program in DRAWN:
        rng = random.Random(program.family)
        function = compile_function(program.source(), program.name)
        what, value = outcome(function, sample_args(program, rng))
        if what == "value":
            assert type(value) is kinds[program.returns], program.source()


def test_there_are_hundreds_of_families() -> None:
    assert len({p.family for p in DRAWN}) > 200


def test_every_classic_is_admitted_with_some_constants() -> None:
    admitted = set()
    for seed in range(12 * len(CLASSICS)):
        rng = random.Random(seed)
        program = _classic(rng, CLASSICS[seed % len(CLASSICS)].name)
        if program.family not in admitted and admit_program(program, rng) is not None:
            admitted.add(program.family)
    assert admitted == {f"classic.{c.name}" for c in CLASSICS}


def _classic(rng: random.Random, name: str) -> Program:
    while (program := draw_classic(rng)).family != f"classic.{name}":
        pass
    return renamed(program, rng)


def test_the_hash_forgets_names_hints_and_docstring_and_nothing_else() -> None:
    plain = program_hash("def f(xs):\n    return sum(xs)\n")
    assert program_hash('def g(data: list) -> int:\n    """Add."""\n    return sum(data)\n') == plain
    assert program_hash("def f(xs):\n    return max(xs)\n") != plain
    one = program_hash("def f(xs):\n    return [x + 1 for x in xs]\n")
    assert program_hash("def f(ys):\n    return [v + 1 for v in ys]\n") == one
    assert program_hash("def f(xs):\n    return [x + 2 for x in xs]\n") != one


def test_endless_loops_and_growing_numbers_are_stopped() -> None:
    endless = compile_function("def f(n):\n    while True:\n        n += 1\n", "f")
    growing = compile_function("def f(n):\n    while True:\n        n = n * n\n", "f")
    for function in (endless, growing):
        with pytest.raises(OutOfSteps):
            function(7)
        assert outcome(function, [7]) == ("raise", "OutOfSteps")


def test_arguments_are_never_mutated() -> None:
    function = compile_function("def f(xs):\n    xs.append(1)\n    return xs\n", "f")
    args = [[3]]
    assert outcome(function, args) == ("value", [3, 1])
    assert args == [[3]]


@pytest.mark.parametrize(
    "body",
    [("return 7",), ("return xs",), ("return len(xs) // 100",), ("return xs[40]",), ("return 1 // 0",)],
    ids=["constant", "identity", "nearly constant", "raises", "always raises"],
)
def test_dull_and_broken_programs_are_refused(body: tuple[str, ...]) -> None:
    assert admit_program(_program(*body), random.Random(0)) is None


def test_admitted_programs_vary_and_their_cases_are_what_the_reference_returns() -> None:
    for seed in range(40):
        found = draw_admitted(random.Random(seed), Split.TRAIN)
        program = found.program
        function = compile_function(program.source(), program.name)
        cases = (*found.examples, *found.hidden)
        assert all(outcome(function, c.args) == ("value", c.expected) for c in cases)
        assert len({canonical_json(c.expected) for c in cases}) >= (
            2 if program.returns is ValueKind.BOOL else 3
        )
        assert len(found.hidden) >= 8
        assert len({canonical_json(c.args) for c in cases}) == len(cases)


def test_about_one_family_of_five_is_for_tests() -> None:
    families = {draw_program(random.Random(seed)).family for seed in range(3000)}
    share = sum(split_of(f) is Split.TEST for f in families) / len(families)
    assert 0.15 < share < 0.25
