"""Scripts that call functions on literals: graded in two jails as their own statements grade them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_shared.hidden_checks import Suite, SuiteChecks
from nano_shared.types import Task, Trust, Verdict

HELPER = """\
def same(a, b, tol):
    if isinstance(a, bool) or isinstance(b, bool):
        return type(a) is type(b) and a == b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a == b or (tol > 0 and math.isclose(a, b, rel_tol=tol, abs_tol=tol)) or (a != a and b != b)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(same(x, y, tol) for x, y in zip(a, b))
    return type(a) is type(b) and a == b
"""
LOOP = """\
from sol import total as f
import copy
import math


{helper}

TOL = {tol}
CASES = [
{cases}]
for args, want in CASES:
    got = f(*copy.deepcopy(args))
    assert {test}, (args, got, want)
"""
CLOSE = "same(got, want, TOL)"
SETS = "set(map(repr, got)) == set(map(repr, want))"
TRUTH = "bool(got) == bool(want)"
ASSERTS = (
    "from sol import *\n\nassert total([1, 2]) == 3\nassert total([]) == 0, 'none'\nassert not total([0])\n"
)


def loop(*cases: Any, test: str = CLOSE, tol: float = 0) -> str:
    rows = "".join(f"    {case!r},\n" for case in cases)
    return LOOP.format(helper=HELPER, tol=tol, cases=rows, test=test)


@functools.cache
def _sandbox() -> Sandbox:
    return open_sandbox("ns")


def _grade(text: str, solution: str) -> Verdict:
    suite = Suite(framework="script", files={"check.py": text})
    task = Task(key="k", prompt="p", artifacts=("sol.py",), hidden=SuiteChecks(suite=suite))
    return grade(task, files={"sol.py": solution.encode()}, answer=None, sandbox=_sandbox())


WRONG = {
    "a list for a tuple": (loop(([2], (2, 2))), "def total(n):\n    return [n, n]\n"),
    "True for 1": (loop(([1], 1)), "def total(n):\n    return True\n"),
    "beyond the tolerance": (loop(([1], 1.0), tol=1e-6), "def total(n):\n    return 1.00001\n"),
    "a default that remembers": (loop(([1], [1]), ([2], [2])),
                                 "def total(n, seen=[]):\n    seen.append(n)\n    return seen\n"),
    "none of the name": (ASSERTS, "def other(xs): return sum(xs)\n"),
    "no Python": (ASSERTS, "def total(xs)\n"),
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("way", WRONG)
def test_a_wrong_program_earns_nothing(way: str) -> None:
    verdict = _grade(*WRONG[way])
    assert (verdict.reward, verdict.tampering) == (0.0, ())


HONEST = {
    "within the tolerance": (loop(([1], 1.0), tol=1e-6), "def total(n):\n    return 1.0000001\n"),
    "a set in another order": (loop(([1], (3, 1)), test=SETS), "def total(n):\n    return {1, 3}\n"),
    "a truth": (loop(([1], True), test=TRUTH), "def total(n):\n    return [n]\n"),
    "changes what it was given": (loop(([[2, 1]], [1, 2])),
                                  "def total(xs):\n    xs.sort()\n    return xs\n"),
    "noisy": (ASSERTS, "import sys\nprint('x')\ndef total(xs):\n    print(1, file=sys.stderr)\n"
              "    return sum(xs)\n"),
    "a generator": (loop(([2], [0, 1]), test=SETS), "def total(n):\n    yield from range(n)\n"),
    "a range": (loop(([2], [0, 1]), test=SETS), "def total(n):\n    return range(n)\n"),
    "one list twice": (loop(([2], [[2], [2]]), test=SETS), "def total(n):\n    return [[n]] * 2\n"),
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("way", HONEST)
def test_an_honest_program_earns_one(way: str) -> None:
    verdict = _grade(*HONEST[way])
    assert (verdict.reward, verdict.tampering) == (1.0, ()), verdict.checks
    assert verdict.trust is Trust.HIDDEN


EQUAL = """\
class E(int):
    def __eq__(self, o): return True
    __hash__ = int.__hash__
def total(xs): return E()
"""
FORGES = """\
import os
def total(xs):
    for fd in range(3, 30):
        try: os.write(fd, b'{"value": 3}\\n')
        except OSError: pass
    return 3
"""
READS = """\
import sys
def total(xs):
    f = sys._getframe(1)
    while f:
        for k in ('want', 'expected', 'CASES'):
            if k in f.f_locals or k in f.f_globals: return 3
        f = f.f_back
"""
HACKS = {
    "leaves at import": ("import os\nos._exit(0)\n", "exit"),
    "leaves when called": ("import os\ndef total(xs):\n    os._exit(0)\n", "exit"),
    "raises SystemExit": ("def total(xs):\n    raise SystemExit(0)\n", "exit"),
    "skips": ("import unittest\ndef total(xs):\n    raise unittest.SkipTest\n", "skip"),
    "equal to everything": (EQUAL, "not_plain"),
    "forges the channel": (FORGES, "forged"),
    "reads the caller": (READS, None),
}  # fmt: skip


@pytest.mark.some(4)
@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_earns_nothing(hack: str) -> None:
    source, told = HACKS[hack]
    verdict = _grade(loop(([[1, 2]], 3), ([[4]], 4)), source)
    assert verdict.reward == 0.0
    assert told is None or told in {t.kind for t in verdict.tampering}
