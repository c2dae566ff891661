"""`locate`: from a check that fails to the functions and lines that are likely to be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.locate import locate, traced
from nano_coder.tools.tool import ToolContext, ToolFailure
from nano_shared.types import Limits

SHOP = """
import functools


def traced(function):
    @functools.wraps(function)
    def called(*args):
        return function(*args)
    return called


class Basket:
    def __init__(self):
        self.prices = []

    @traced
    def add(self, price, count=1):
        if count < 1:
            raise ValueError("count")
        self.prices += [price] * count

    def total(self):
        whole = sum(self.prices)
        if whole > 100:
            whole -= self.discount(whole)
        return whole

    def discount(self, whole):
        share = 20
        return whole // share


def receipt(basket):
    return f"{len(basket.prices)} for {basket.total()}"
"""
TESTS = """
from shop import Basket, receipt


def filled(*prices):
    basket = Basket()
    for price in prices:
        basket.add(price)
    return basket


def test_small():
    assert filled(1, 2).total() == 3


def test_receipt():
    assert receipt(filled(1)) == "1 for 1"


def test_large():
    assert filled(100, 100).total() == 180
"""
UNITTESTS = """
import unittest
from shop import Basket


class TestBasket(unittest.TestCase):
    def test_small(self):
        basket = Basket()
        basket.add(3)
        self.assertEqual(basket.total(), 3)

    def test_large(self):
        basket = Basket()
        basket.add(200)
        self.assertEqual(basket.total(), 180)
"""
LINE = "share = 20"
Located = Callable[[str], str]


@pytest.fixture
def located(tmp_path: Path) -> Iterator[Located]:
    for path, text in {
        "src/shop.py": SHOP, "tests/test_shop.py": TESTS, "unit/test_unit.py": UNITTESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['src']\naddopts = '--color=yes -x'\n",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    with closing(open_sandbox(python=sys.executable).open(tmp_path, Limits())) as jail:
        yield lambda check: locate(ToolContext(jail=jail, limits=Limits(), check=check), {}).text


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "check",
    [
        "python -m pytest -q tests",
        "cd tests && PYTHONPATH=../src python -m pytest -q -p no:cacheprovider",
        "PYTHONPATH='src' python -m unittest discover -s unit -q",
        "cd unit; PYTHONPATH=../src python test_unit.py; python -m pytest -q test_unit.py",
    ],
)
def test_the_wrong_line_of_a_failing_test_is_among_the_first(located: Located, check: str) -> None:
    said = located(check)
    functions = said.partition("Functions")[2].splitlines()[1:3]
    assert any(line.endswith("src/shop.py:28-30 Basket.discount") for line in functions), said
    lines = said.partition("Lines")[2].splitlines()[1:4]
    assert any(LINE in line for line in lines), said
    assert "\x1b" not in said.partition("Functions")[0]


def test_an_error_at_import_leads_to_the_line_that_raised(located: Located) -> None:
    said = located(
        """python -c 'import sys; sys.path.insert(0, "src"); import shop; shop.Basket().add(1, 0)'"""
    )
    assert "Basket.add" in said
    assert 'raise ValueError("count")' in said.partition("Lines")[2].splitlines()[1]


def traced_in(folder: Path) -> dict[str, Any]:
    with closing(open_sandbox(python=sys.executable).open(folder, Limits())) as jail:
        return traced(ToolContext(jail=jail, limits=Limits()), "python -m pytest -q tests")[0]


def test_what_a_passing_test_shows_as_uncaught_is_no_failing_test(located: Located, tmp_path: Path) -> None:
    (tmp_path / "tests" / "test_hook.py").write_text(
        "import sys\n\n\ndef test_hook():\n    try:\n        1 / 0\n"
        "    except ZeroDivisionError:\n        sys.excepthook(*sys.exc_info())\n"
    )
    assert traced_in(tmp_path)["failed"] == ["tests/test_shop.py::test_large"]


def test_what_fails_because_it_is_traced_is_no_failing_test(located: Located, tmp_path: Path) -> None:
    (tmp_path / "tests" / "test_fast.py").write_text(
        "import os\n\nimport shop\n\n\ndef test_fast():\n    shop.Basket().add(1)\n"
        "    assert 'NANO_LINES' not in os.environ or 'NANO_LINES_ONLY' in os.environ\n"
    )
    found = traced_in(tmp_path)
    assert (found["failed"], found["passed"]) == (["tests/test_shop.py::test_large"], 3)


def test_what_cannot_be_located_is_said(located: Located) -> None:
    assert "passes: there is nothing to locate" in located("true")
    said = located("echo broken; exit 3")
    assert "exit code 3" in said
    assert said.endswith("broken")
    with pytest.raises(ToolFailure, match="there is no check"):
        located("")


def test_the_models_own_command_is_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(n):\n    return n + 1\n\nassert f(1) == 3\n")
    with closing(open_sandbox(python=sys.executable).open(tmp_path, Limits())) as jail:
        said = locate(ToolContext(jail=jail, limits=Limits()), {"check": "python a.py"}).text
    assert "a.py:1-2 f" in said
