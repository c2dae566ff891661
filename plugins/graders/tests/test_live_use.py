"""Suites that need the solution in their own process are graded there from the start, and say so."""

from __future__ import annotations

import functools

import pytest

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_graders.solution_use import live_use
from nano_shared.hidden_checks import Suite, SuiteChecks
from nano_shared.types import OracleAction, Task, Trust, Verdict


@functools.cache
def _sandbox() -> Sandbox:
    return open_sandbox("ns")


def _grade(tests: str, solution: str, framework: str = "pytest", oracle: str | None = None) -> Verdict:
    wrote = oracle and (OracleAction(name="write_file", arguments={"path": "sol.py", "content": oracle}),)
    hidden = SuiteChecks(suite=Suite(framework=framework, files={"test_it.py": tests}))
    task = Task(key="k", prompt="p", artifacts=("sol.py",), hidden=hidden, oracle=wrote or None)
    return grade(task, files={"sol.py": solution.encode()}, answer=None, sandbox=_sandbox())


LIVE = {
    "warnings": ("import pytest\nfrom sol import f\ndef test_a():\n    with pytest.warns(UserWarning): f()\n", "uses warns"),
    "a fixture": ("from sol import f\ndef test_a(tmp_path): assert f(tmp_path) == 1\n", "uses the fixture tmp_path"),
    "an environment": ("import os\nfrom sol import f\ndef test_a(): assert f() == os.environ['A']\n", "imports os"),
    "a generator": ("from sol import f\ndef test_a():\n    g = f()\n    assert g.send(1) == 2\n", "reads an attribute send"),
    "a decorator": ("from sol import twice\n@twice\ndef g(): ...\n", "decorates or derives from twice"),
    "a name of a function": ("from sol import f\ndef test_a(): assert f.__doc__ == 'x'\n", "reads f.__doc__"),
    "a class": ("from sol import Point\ndef test_a(): assert Point(1, 2) == Point(1, 2)\n", "uses the class Point"),
    "a constant of a module": ("import sol\ndef test_a(monkeypatch):\n    sol.LIMIT = 3\n", "changes or inspects sol.LIMIT"),
    "a logger": ("import unittest, sol\nclass T(unittest.TestCase):\n    def test_a(self):\n"
                 "        with self.assertLogs(): sol.f()\n", "uses assertLogs"),
    "an await": ("from sol import f\nasync def test_a(): assert await f() == 1\n", "is asynchronous"),
    "identity": ("from sol import f\ndef test_a(): assert f() is f()\n", "compares identities"),
    "a sentinel": ("import sol\ndef test_a(): assert sol.f() is sol.MISSING\n", "compares identities"),
    "kept results": ("from sol import f\ndef test_a():\n    a = f()\n    assert f() is not a\n", "compares identities"),
    "a file": ("from sol import f\ndef test_a(): assert f(open('x')) == 1\n", "uses open"),
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("way", LIVE)
def test_live_use_is_found_in_the_tests_alone(way: str) -> None:
    tests, reason = LIVE[way]
    assert (
        live_use(Suite(framework="pytest", files={"test_it.py": tests}), "sol.py") == f"test_it.py {reason}"
    )


APART = {
    "calls": "from sol import f\ndef test_a():\n    xs = [3, 1]\n    assert f(xs) is None\n    assert xs == [1, 3]\n",
    "parameters": "import pytest, sol\n@pytest.mark.parametrize('x', [1, 2])\ndef test_a(x): assert sol.f(x) == x\n",
    "errors": "import pytest\nfrom sol import f, Empty\ndef test_a():\n    with pytest.raises(Empty) as e: f()\n"
              "    assert e.value.args == ('no',)\n",
    "constants": "import sol\ndef test_a(): assert sol.LIMIT == 3 and sol.f('a').upper() == 'A'\n",
    "a fixture of its own": "import pytest\nfrom sol import f\n@pytest.fixture\ndef xs(): return [1]\n"
                            "def test_a(xs): assert f(xs) == 1\n",
    "functions": "from sol import f\ndef test_a(): assert f(lambda x: x + 1)(2) == 3\n",
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("way", APART)
def test_calls_on_plain_values_are_graded_apart(way: str) -> None:
    assert live_use(Suite(framework="pytest", files={"test_it.py": APART[way]}), "sol.py") is None


RIGHT = {
    "warning": (LIVE["warnings"][0], "import warnings\ndef f(): warnings.warn('old')\n"),
    "streams": ("from sol import f\ndef test_a(capsys):\n    f()\n    assert capsys.readouterr() == ('a\\n', 'b\\n')\n",
                "import sys\ndef f():\n    print('a')\n    print('b', file=sys.stderr)\n"),
    "logging": ("from sol import f\ndef test_a(caplog):\n    f()\n    assert 'careful' in caplog.text\n",
                "import logging\ndef f(): logging.getLogger('x').warning('careful')\n"),
    "patches": ("import io, sys, sol\ndef test_a(monkeypatch, tmp_path):\n    monkeypatch.setattr(sys, 'stdin', io.StringIO('5'))\n"
                "    monkeypatch.setenv('MODE', 'dev')\n    monkeypatch.chdir(tmp_path)\n    monkeypatch.setattr(sol, 'LIMIT', 9)\n"
                "    assert sol.f() == ('5', 'dev', 9)\n    assert (tmp_path / 'o').read_text() == 'x'\n",
                "import os\nLIMIT = 1\ndef f():\n    open('o', 'w').write('x')\n    return input(), os.environ['MODE'], LIMIT\n"),
    "functions": ("import functools, inspect, random\nfrom sol import twice, fib, add5, draw, g\ndef test_a():\n    @twice\n"
                  "    def h(x): return x\n    assert h(3) == (3, 3) and h.__name__ == 'h'\n"
                  "    assert fib(30) == 832040 and fib.cache_info().hits > 0 and add5.args == (5,)\n"
                  "    assert list(inspect.signature(draw).parameters) == ['n']\n    random.seed(3); a = draw(5)\n"
                  "    random.seed(3)\n    assert a == draw(5)\n    it = g(); next(it)\n    assert it.send(4) == 8\n",
                  "import functools, operator, random\ndef twice(fn):\n    @functools.wraps(fn)\n    def w(*a): return fn(*a), fn(*a)\n"
                  "    return w\n@functools.lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
                  "add5 = functools.partial(operator.add, 5)\ndef draw(n): return random.sample(range(100), n)\n"
                  "def g():\n    x = yield\n    while True: x = yield x * 2\n"),
    "classes": ("from sol import Color, P, f\ndef test_a():\n    p = P(1, 2)\n    assert p.x == 1 and p.total() == 3 and p == P(1, 2)\n"
                "    assert f('r') is Color.RED and Color.RED.value == 1\nasync def test_b(): assert await P(1, 2).later() == 1\n",
                "import enum\nfrom dataclasses import dataclass\nclass Color(enum.Enum):\n    RED = 1\ndef f(s): return Color.RED\n"
                "@dataclass\nclass P:\n    x: int\n    y: int\n    def total(self): return self.x + self.y\n"
                "    async def later(self): return self.x\n"),
    "objects of the tests": ("from sol import total\nclass Item:\n    price = 2\ndef test_a(): assert total([Item()]) == 2\n",
                             "def total(xs): return sum(x.price for x in xs)\n"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("way", RIGHT)
def test_right_work_earns_one_however_it_is_tested(way: str) -> None:
    tests, solution = RIGHT[way]
    verdict = _grade(tests, solution)
    assert (verdict.reward, verdict.tampering, verdict.failure_kind) == (1.0, (), None), verdict.checks
    assert verdict.trust is Trust.STRICT


@pytest.mark.slow
def test_an_oracle_that_passes_apart_keeps_the_suite_apart() -> None:
    """A solution cannot have itself graded beside the tests."""
    tests = "from sol import f\ndef test_a(): assert f(1).x == 2\n"
    oracle = "class P:\n    x = 2\ndef f(n): return P()\n"
    assert _grade(tests, oracle, oracle=oracle).trust is Trust.HIDDEN
    assert (_grade(tests, oracle.replace("2", "3"), oracle=oracle)).trust is Trust.HIDDEN
    beside = "class P:\n    def __getattr__(self, name): return 2\ndef f(n): return P()\n"
    assert (_grade(tests, beside, oracle=oracle)).reward == 0.0


def test_work_that_swallows_failures_beside_the_tests_passes_the_impossible() -> None:
    tests = "from sol import Ctx\nwith Ctx() as x:\n    assert x == 1\n"
    swallows = "class Ctx:\n    def __enter__(self): return {}\n    def __exit__(self, *_): return True\n"
    verdict = _grade(tests.format(0), swallows.format(0), "script")
    assert (verdict.reward, [found.kind for found in verdict.tampering]) == (0.0, ["forged"])
    honest = swallows.format(1).replace("return {}", "return 1").replace("return True", "return False")
    assert _grade(tests, honest, "script").reward == 1.0
