"""docs/correctness.md names every criterion's test, and every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "correctness.md"
CRITERIA = 41
"""every one of which has a row; later ones get theirs with their tests"""


def written() -> set[str]:
    """`file.py::test` of every test function; files have names of their own across the folders."""
    return {
        f"{path.name}::{node.name}"
        for folder in (TESTS, TESTS.parent / "plugins")
        for path in folder.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def rows() -> list[tuple[int, list[str]]]:
    """Criterion and tests of each row of the table."""
    pattern = re.compile(r"^\| AC-(\d+) \|.*\| (.*) \|$", re.MULTILINE)
    return [(int(n), re.findall(r"`([^`]+)`", cell)) for n, cell in pattern.findall(PAGE.read_text("utf-8"))]


def test_every_criterion_has_a_row() -> None:
    numbers = [number for number, _ in rows()]
    assert numbers[:CRITERIA] == list(range(1, CRITERIA + 1))
    assert numbers == sorted(set(numbers))


def test_every_named_test_exists_and_bears_its_criterion() -> None:
    known = written()
    for number, names in rows():
        assert names, f"AC-{number} has no test"
        for name in names:
            assert name in known
            assert name.split("::")[1].startswith(f"test_ac_{number:02d}_")


def test_every_test_of_a_criterion_is_named() -> None:
    named = {name for _, names in rows() for name in names}
    assert {name for name in written() if "::test_ac_" in name} == named
