"""Answers that a scorer would evaluate are screened: an expression passes, a program never does."""

from __future__ import annotations

import pytest

from nano_suites.checks.scored_answer import plain


@pytest.mark.parametrize(
    "answer",
    [
        "3 + 4*(2 - 1)",
        "x**2/2 + C",
        "sin(2*x) + exp(x)",
        "5! - 3",
        "[[1, 2], [3, 4]]",
        "['A', 'B']",
        "1 2 3",
        "zzz",
    ],
)
def test_expressions_pass(answer: str) -> None:
    assert plain(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "exec('1')", "__import__('os')._exit(0)", "().__class__", "[x for x in (1,)]", "lambda: 1",
        "open('f')",
        "exec('1')!", "print(1) print(2)", "f'{exit()}'", "sin(exit())", "(y := 1)", "x.diff",
        "max(1, key=eval)",
    ],
)  # fmt: skip
def test_programs_do_not(answer: str) -> None:
    assert not plain(answer)
