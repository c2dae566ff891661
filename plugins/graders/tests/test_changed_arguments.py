"""What a solution does to its arguments is seen by the tests, and no expected value may be made of it."""

from __future__ import annotations

import functools

import pytest

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_graders import two_jail_suite as suites
from nano_shared.hidden_checks import Suite, SuiteChecks
from nano_shared.types import OracleAction, Task, Trust, Verdict

RIGHT = "def f(xs):\n    return sum(xs)\n"
EMPTIES = "def f(xs):\n    xs.clear()\n    return 0\n"
SORTS = "def f(xs):\n    xs.sort()\n"
SORTS_AND_RETURNS = "def f(xs):\n    xs.sort()\n    return xs\n"

ONE_LINE = "from sol import f\nxs = [1, 2]\nassert f(xs) == sum(xs)\n"
TWO_LINES = "from sol import f\nxs = [1, 2]\ngot = f(xs)\nassert got == sum(xs)\n"
SHARED = (
    "from sol import f\nDATA = [[1], [2, 3]]\nfor xs in DATA:\n    assert f(xs) == sum(xs)\nassert DATA\n"
)
NESTED = "from sol import f\nrow = {'xs': [1, 2]}\nassert f(row['xs']) == sum(row['xs'])\n"
IN_PLACE = "from sol import f\nxs = [2, 1]\nf(xs)\nassert xs == [1, 2]\n"
UNITTEST = """\
import unittest, sol
class T(unittest.TestCase):
    def test_it(self):
        xs = [1, 2]
        self.assertEqual(sol.f(xs), sum(xs))
"""


@functools.cache
def _sandbox() -> Sandbox:
    return open_sandbox("ns")


def _grade(tests: str, solution: str, reference: str | None, framework: str = "script") -> Verdict:
    oracle = None
    if reference is not None:
        oracle = (OracleAction(name="write_file", arguments={"path": "sol.py", "content": reference}),)
    suite = Suite(framework=framework, files={"test_it.py": tests})  # type: ignore[arg-type]
    hidden = SuiteChecks(suite=suite)
    task = Task(key="k", prompt="p", artifacts=("sol.py",), hidden=hidden, oracle=oracle)
    return grade(task, files={"sol.py": solution.encode()}, answer=None, sandbox=_sandbox())


@pytest.mark.parametrize("tests", [ONE_LINE, TWO_LINES, SHARED, NESTED])
def test_an_expected_value_that_the_solution_chose_is_no_pass(tests: str) -> None:
    verdict = _grade(tests, EMPTIES, RIGHT)
    assert verdict.reward == 0.0
    assert [t.kind for t in verdict.tampering] == ["changed_arguments"]
    assert _grade(tests, RIGHT, RIGHT).reward == 1.0


def test_nor_is_it_in_a_test_of_unittest() -> None:
    verdict = _grade(UNITTEST, EMPTIES, RIGHT, "unittest")
    assert (verdict.reward, [t.kind for t in verdict.tampering]) == (0.0, ["changed_arguments"])


def test_a_suite_about_changes_in_place_is_passed_by_them() -> None:
    for solution in (SORTS, SORTS_AND_RETURNS, "def f(xs):\n    xs[:] = sorted(xs)\n"):
        verdict = _grade(IN_PLACE, solution, SORTS)
        assert (verdict.reward, verdict.trust, verdict.tampering) == (1.0, Trust.HIDDEN, ())
    assert _grade(IN_PLACE, "def f(xs):\n    return sorted(xs)\n", SORTS).reward == 0.0


@pytest.mark.parametrize(
    "solution",
    [
        "def f(xs):\n    total = 0\n    while xs:\n        total += xs.pop()\n    return total\n",
        "def f(xs):\n    xs.append(0)\n    return sum(xs)\n",
    ],
)
def test_an_honest_solution_may_use_up_what_it_is_given(solution: str) -> None:
    tests = "from sol import f\nxs = [1, 2]\nwant = 3\nassert f(xs) == want\n"
    verdict = _grade(tests, solution, RIGHT)
    assert (verdict.reward, verdict.trust, verdict.tampering) == (1.0, Trust.HIDDEN, ())


def test_an_argument_that_is_changed_and_returned_is_what_it_became() -> None:
    """By value, too, the result holds the change, however deep it lies; only the caller's object does not."""
    tests = "from sol import f\nrow = {'xs': [2, 1]}\ngot = f(row)\nassert got == {'xs': [1, 2]}\n"
    solution = "def f(row):\n    row['xs'].sort()\n    return row\n"
    copies = "def f(row):\n    return {'xs': sorted(row['xs'])}\n"
    verdict = _grade(tests, solution, copies)
    assert (verdict.reward, verdict.tampering) == (1.0, ())


def test_without_a_reference_a_pass_that_rests_on_a_change_is_trusted_less() -> None:
    for tests, solution in ((ONE_LINE, EMPTIES), (IN_PLACE, SORTS)):
        verdict = _grade(tests, solution, None)
        assert (verdict.reward, verdict.trust) == (1.0, Trust.STRICT)
    assert _grade(ONE_LINE, RIGHT, None).trust is Trust.HIDDEN


def test_the_reference_is_asked_once_a_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = suites._run

    def counted(job: suites.Job, *rest: object, **options: bool) -> object:
        asked.append(job.artifacts == job.reference)
        return real(job, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(suites, "_run", counted)
    tests = ONE_LINE + "assert f([5]) in (5, 0)\n"
    assert [_grade(tests, EMPTIES, RIGHT).reward for _ in range(2)] == [0.0, 0.0]
    assert asked.count(True) == 1
