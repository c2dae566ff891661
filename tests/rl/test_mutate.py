"""What mutation promises: one line changes, it still parses, and hidden cases notice."""

from __future__ import annotations

import ast
import random

import pytest

from nano_rl.tasks.mutate import mutant_of, mutants, splices_by_function
from nano_shared.types import Split
from nano_suites.functions.admitted_program import MAX_HIDDEN, draw_admitted
from nano_suites.functions.program import compile_function, outcome

KINDS = ("operator", "comparison", "constant", "name", "method", "flag", "variable", "step")


def _lines(body: str, params: str = "a, b") -> set[str]:
    return {m.new.strip() for m in mutants(f"def f({params}):\n    {body}\n")}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a + b", {"return a - b", "return a * b"}),
        ("return a // b", {"return a % b", "return a * b"}),
        ("return a < b", {"return a <= b", "return a > b"}),
        ("return a == b", {"return a != b"}),
        ("return a and b", {"return a or b"}),
        ("return min(a, b)", {"return max(a, b)"}),
        ("return sum(a)", {"return len(a)"}),
        ("return a[0]", {"return a[1]"}),
        ("return a * 3", {"return a * 4", "return a * 2"}),
        ("return sorted(a, reverse=True)", {"return sorted(a, reverse=False)"}),
        ("return a.upper()", {"return a.lower()"}),
        ("return a.startswith(b)", {"return a.endswith(b)", "return b.startswith(b)"}),
        ("return a - b", {"return b - b", "return a - a"}),
        ("return -a", {"return a"}),
        ("return a not in b", {"return a in b"}),
    ],
)
def test_each_kind_of_mistake_is_made(body: str, expected: set[str]) -> None:
    assert expected <= _lines(body)


def test_brackets_between_operands_are_kept() -> None:
    assert "return (a - b) * (a - 1)" in _lines("return (a + b) * (a - 1)")
    assert "return (a + b) + (a - 1)" in _lines("return (a + b) * (a - 1)")


def test_augmented_assignment_is_mutated() -> None:
    source = "def f(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return total\n"
    assert "total -= x" in {m.new.strip() for m in mutants(source)}


def test_docstrings_and_signatures_are_left_alone() -> None:
    source = 'def f(a, b=1):\n    """Return a + 1 of 2."""\n    return a\n'
    assert {m.line for m in mutants(source)} == {3}


def test_a_mutant_changes_one_line_and_parses() -> None:
    for seed in range(60):
        source = draw_admitted(random.Random(seed), Split.TRAIN).program.source()
        for mutant in mutants(source):
            before, after = source.split("\n"), mutant.source.split("\n")
            differ = [n for n, (x, y) in enumerate(zip(before, after, strict=True), 1) if x != y]
            assert differ == [mutant.line]
            assert (before[mutant.line - 1], after[mutant.line - 1]) == (mutant.old, mutant.new)
            assert mutant.kind in KINDS
            ast.parse(mutant.source)


def test_every_function_and_method_of_a_module_is_mutated() -> None:
    source = (
        "N = 3\n\n\nclass Cart:\n    @property\n    def size(self):\n        return len(self.items) + 1\n\n"
        "    async def later(self, n):\n        return n > 2\n\n\ndef plain():\n    pass\n\n\n"
        "def text(n):\n    'é'\n    name = 'é' * (n + 1)\n    return f'{n + 1} of {name}' * 2\n"
    )
    found = [[mutant_of(source, splice) for splice in each] for each in splices_by_function(source)]
    lines = [{mutant.new.strip() for mutant in of_function if mutant} for of_function in found]
    assert len(lines) == 3  # plain() has none
    assert lines[0] >= {"return len(self.items) - 1", "return sum(self.items) + 1"}
    assert lines[1] >= {"return n >= 2", "return n > 3"}
    # columns count bytes in a line that is not ASCII, and are wrong within f-strings before Python 3.12
    assert lines[2] == {f"return f'{{n + 1}} of {{name}}' * {number}" for number in (1, 3)} | {
        f"return f'{{n + 1}} of {{name}}' {sign} 2" for sign in "+-"
    }
    assert splices_by_function("def f(:\n") == []


def test_hidden_cases_kill_nine_of_ten_telling_mutants() -> None:
    for seed in range(60):
        admitted = draw_admitted(random.Random(seed), Split.TRAIN)
        program = admitted.program
        assert len(admitted.hidden) <= MAX_HIDDEN
        assert admitted.bugs
        for bug in admitted.bugs:
            function = compile_function(bug.source, program.name)
            assert any(outcome(function, c.args) != ("value", c.expected) for c in admitted.hidden), bug
