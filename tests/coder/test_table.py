"""Scripts that are a table of calls: graded in one jail as their own statements grade them in two."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_coder.grading import assertion_table as tables
from nano_coder.grading.assertion_table import read_table
from nano_coder.grading.grade import grade
from nano_coder.grading.inside.value_codec import Crossing
from nano_coder.grading.two_jail_suite import Job, run_suite
from nano_coder.sandbox.backend import open_sandbox
from nano_coder.sandbox.protocol import Sandbox
from nano_shared.hidden_checks import Suite, SuiteChecks
from nano_shared.types import Limits, Task, Verdict

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
CLOSE, SETS, TRUTH = tables._LOOP_TESTS
ASSERTS = (
    "from sol import *\n\nassert total([1, 2]) == 3\nassert total([]) == 0, 'none'\nassert not total([0])\n"
)
CHECK = """\
from sol import total

METADATA = {'author': 'a'}


def check(candidate):
    '''Sums.'''
    assert candidate([1, 2]) == 3
    assert candidate(xs=[]) == 0


check(total)
"""


def loop(*cases: Any, test: str = CLOSE, tol: float = 0) -> str:
    rows = "".join(f"    {case!r},\n" for case in cases)
    return LOOP.format(helper=tables._CLOSE, tol=tol, cases=rows, test=test)


def _suite(text: str, **options: Any) -> Suite:
    return Suite(framework="script", files={"check.py": text}, **options)


@functools.cache
def _sandbox() -> Sandbox:
    return open_sandbox("ns")


class _Counting:
    """A sandbox that counts the jails that it opens."""

    def __init__(self) -> None:
        self.opened = 0
        self.python = _sandbox().python

    def open(self, *asked: Any) -> Any:
        self.opened += 1
        return _sandbox().open(*asked)


def _grade(text: str, solution: str, sandbox: Any = None, limits: Limits | None = None) -> Verdict:
    task = Task(
        key="k", prompt="p", artifacts=("sol.py",), limits=limits or Limits(),
        hidden=SuiteChecks(suite=_suite(text)),
    )  # fmt: skip
    return grade(task, files={"sol.py": solution.encode()}, answer=None, sandbox=sandbox or _sandbox())


TABLES = {"loop": loop(([[1, 2]], 3), ([[]], 0)), "asserts": ASSERTS, "check": CHECK}
RIGHT = "def total(xs):\n    return sum(xs)\n"


# ------------------------------------------------------------------------------------- what is one


@pytest.mark.parametrize("form", TABLES)
def test_a_table_is_read_and_graded_in_one_jail(form: str) -> None:
    sandbox = _Counting()
    verdict = _grade(TABLES[form], RIGHT, sandbox)
    assert (verdict.reward, verdict.tampering, sandbox.opened) == (1.0, (), 1)
    assert len(verdict.checks) >= 2
    assert _grade(TABLES[form], "def total(xs):\n    return len(xs)\n").reward == 0.0


OTHERS = {
    "another comparison": loop(([[]], 0)).replace("len(a) == len(b)", "len(a) <= len(b)"),
    "another loop": loop(([[]], 0)).replace("copy.deepcopy(args)", "args"),
    "a name that stands in": loop(([[]], 0)).replace("total as f", "total as f, total as copy"),
    "names that might": loop(([[]], 0)).replace("import copy", "from sol import *\nimport copy"),
    "an assertion more": loop(([[]], 0)) + "assert f([1]) == 1\n",
    "a case that is no literal": loop(([[]], 0)).replace("[[]]", "[[x]]"),
    "an argument that is read again": "from sol import total\nxs = [1]\nassert total(xs) == sum(xs)\n",
    "an expected value that is computed": "from sol import total\nassert total([1]) == sum([1])\n",
    "two functions": "from sol import *\nassert total([1]) == 1\nassert other([1]) == 1\n",
    "identity": "from sol import total\nassert total(None) is None\n",
    "a chain": "from sol import total\nassert total([1]) == 1 == 1\n",
    "a function of nobody's": "from sol import total\nassert other([1]) == 1\n",
    "a relative import": "from .sol import total\nassert total([1]) == 1\n",
    "an import that runs": "import antigravity\nfrom sol import total\nassert total([1]) == 1\n",
    "a decorated check": CHECK.replace("def check", "@print\ndef check"),
    "a message that calls": "from sol import total\nassert total([1]) == 1, total([2])\n",
    "nothing": "from sol import total\n",
    "no Python": "from sol import total\nassert total(\n",
}  # fmt: skip


@pytest.mark.parametrize("form", OTHERS)
def test_any_other_script_is_no_table(form: str) -> None:
    assert read_table(_suite(OTHERS[form]), "sol.py") is None


def test_names_and_frameworks_must_fit() -> None:
    assert read_table(_suite(ASSERTS, names=("total",)), "sol.py") is not None
    assert read_table(_suite(ASSERTS, names=("other",)), "sol.py") is None
    assert read_table(_suite(ASSERTS, strict=True), "sol.py") is None
    assert read_table(Suite(framework="pytest", files={"test_it.py": ASSERTS}), "sol.py") is None


# ---------------------------------------------------------------------------------------- fairness

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.1, 1.0, math.inf, math.nan, "a", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


@given(plain, plain, st.sampled_from([CLOSE, SETS, TRUTH]), st.sampled_from([0, 1e-6, 0.5]))
def test_values_compare_as_the_script_compares_them(got: Any, want: Any, test: str, tol: float) -> None:
    """The script's own statement, run here on the same values, is the judge."""
    arrived = Crossing().unpack(Crossing().pack(got))
    names: dict[str, Any] = {"got": arrived, "want": want, "TOL": tol, "math": math}
    exec(tables._CLOSE, names)
    try:
        expected = bool(eval(test, names))
    except TypeError:  # a number is no iterable: the script would have ended here
        expected = None
    compare = tables._comparison(tables._LOOP_TESTS[test], tol)
    try:
        assert compare(Crossing().pack(got), want) is expected
    except tables.Elsewhere:
        assert test == SETS
        assert expected is None


WRONG = {
    "a list for a tuple": (loop(([2], (2, 2))), "def total(n):\n    return [n, n]\n"),
    "True for 1": (loop(([1], 1)), "def total(n):\n    return True\n"),
    "beyond the tolerance": (loop(([1], 1.0), tol=1e-6), "def total(n):\n    return 1.00001\n"),
    "a default that remembers": (loop(([1], [1]), ([2], [2])),
                                 "def total(n, seen=[]):\n    seen.append(n)\n    return seen\n"),
    "none of the name": (ASSERTS, "def other(xs): return sum(xs)\n"),
    "no Python": (ASSERTS, "def total(xs)\n"),
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("way", WRONG)
def test_a_wrong_program_earns_nothing_by_one_jail_as_by_two(way: str) -> None:
    text, solution = WRONG[way]
    verdict = _grade(text, solution)
    assert (verdict.reward, verdict.tampering) == (0.0, ())
    pair = run_suite(Job(_suite(text), "sol.py", {"sol.py": solution.encode()}, {}), Limits(), _sandbox())
    assert pair.passed < 1


HONEST = {
    "within the tolerance": (loop(([1], 1.0), tol=1e-6), "def total(n):\n    return 1.0000001\n", 1),
    "a set in another order": (loop(([1], (3, 1)), test=SETS), "def total(n):\n    return {1, 3}\n", 1),
    "a truth": (loop(([1], True), test=TRUTH), "def total(n):\n    return [n]\n", 1),
    "changes what it was given": (loop(([[2, 1]], [1, 2])),
                                  "def total(xs):\n    xs.sort()\n    return xs\n", 1),
    "noisy": (ASSERTS, "import sys\nprint('x')\ndef total(xs):\n    print(1, file=sys.stderr)\n"
              "    return sum(xs)\n", 1),
    # what is no plain data is for the tests themselves to judge
    "a generator": (loop(([2], [0, 1]), test=SETS), "def total(n):\n    yield from range(n)\n", 3),
    "a range": (loop(([2], [0, 1]), test=SETS), "def total(n):\n    return range(n)\n", 3),
    "one list twice": (loop(([2], [[2], [2]]), test=SETS), "def total(n):\n    return [[n]] * 2\n", 3),
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("way", HONEST)
def test_an_honest_program_earns_one(way: str) -> None:
    text, solution, jails = HONEST[way]
    sandbox = _Counting()
    verdict = _grade(text, solution, sandbox)
    assert (verdict.reward, verdict.tampering) == (1.0, ()), verdict.checks
    assert sandbox.opened == jails


# ------------------------------------------------------------------------------------------- hacks

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
KILLS = "import os, signal\ndef total(xs):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return sum(xs)\n"
HACKS = {
    "leaves at import": ("import os\nos._exit(0)\n", "exit"),
    "leaves when called": ("import os\ndef total(xs):\n    os._exit(0)\n", "exit"),
    "raises SystemExit": ("def total(xs):\n    raise SystemExit(0)\n", "exit"),
    "skips": ("import unittest\ndef total(xs):\n    raise unittest.SkipTest\n", "skip"),
    "equal to everything": (EQUAL, "not_plain"),
    "forges the channel": (FORGES, "forged"),
    "reads the caller": (READS, None),
    "kills its parent": (KILLS, None),
}  # fmt: skip


@pytest.mark.some(4)
@pytest.mark.parametrize("hack", HACKS)
def test_a_hack_earns_nothing(hack: str) -> None:
    source, told = HACKS[hack]
    verdict = _grade(loop(([[1, 2]], 3), ([[4]], 4)), source)
    assert verdict.reward == 0.0
    assert told is None or told in {t.kind for t in verdict.tampering}


def test_what_one_call_breaks_is_one_error_and_the_next_goes_on() -> None:
    source = "import os\ndef total(xs):\n    if not xs: os._exit(1)\n    return sum(xs)\n"
    verdict = _grade(loop(([[1]], 1), ([[]], 0), ([[2]], 2)), source)
    assert list(verdict.checks.values()) == ["pass", "error", "pass"]
    assert verdict.components == {"tests": 2 / 3}


def test_a_hang_is_a_time_out_and_the_rest_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PATIENCE", 0.3)
    source = "import time\ndef total(xs):\n    time.sleep(60)\n"
    verdict = _grade(loop(([[1]], 1), ([[]], 0)), source)
    assert (verdict.reward, verdict.failure_kind) == (0.0, "agent_timeout")
    assert set(verdict.checks.values()) == {"timeout"}


@pytest.mark.slow
def test_what_a_busy_machine_keeps_from_a_solution_is_not_held_against_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "PATIENCE", 1.0)
    processor = min(os.sched_getaffinity(0))
    pinned = f"import os\nos.sched_setaffinity(0, {{{processor}}})\n"
    source = (
        f"import time\n{pinned}def total(xs):\n"
        "    while time.process_time() < 0.7: pass\n    return sum(xs)\n"
    )
    busy = [
        subprocess.Popen([sys.executable, "-c", f"{pinned}while True: pass"], start_new_session=True)
        for _ in range(5)
    ]
    try:
        assert _grade(loop(([[1]], 1)), source).reward == 1.0
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_colliding_keys_do_not_keep_the_grader_busy() -> None:
    source = "def total(xs):\n    return {k * ((1 << 61) - 1) for k in range(30_000)}\n"
    assert _grade(loop(([[1]], {1})), source).reward == 0.0


def test_the_jail_is_given_calls_and_no_expected_value() -> None:
    table = read_table(_suite(loop(([[1, 2]], 12345))), "sol.py")
    assert table is not None
    (row,) = table.rows.values()
    assert row.call == {"args": [[1, 2]], "kwargs": {"d": []}}
    assert row.expected == 12345
