"""Every criterion of docs/correctness.md has tests, and every test of a criterion belongs to a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "correctness.md"


def criteria_with_tests() -> set[int]:
    """The N of every test `test_ac_NN_*`."""
    return {
        int(number[1])
        for folder in (TESTS, TESTS.parent / "plugins")
        for path in folder.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (number := re.match(r"test_ac_(\d\d)_", node.name))
    }


def test_every_criterion_has_a_row_and_a_test_and_no_test_is_without_a_row() -> None:
    rows = [int(number) for number in re.findall(r"^- AC-(\d+): ", PAGE.read_text("utf-8"), re.MULTILINE)]
    assert rows == list(range(1, len(rows) + 1))
    assert len(rows) >= 43
    assert criteria_with_tests() == set(rows)
