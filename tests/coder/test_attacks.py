"""Ways to be paid for what was not done, by class: each earns 0, and no one of them earns nothing for us."""

from __future__ import annotations

import functools
from textwrap import dedent
from typing import Any

import pytest

from nano_coder.grading.grade import grade
from nano_coder.grading.hidden_cases import same_answer
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_graders.solution_use import used_names
from nano_shared.hidden_checks import Case, Metric, Suite
from nano_shared.types import Task, Verdict
from nano_suites.checks.end_state import _same_cells
from nano_suites.checks.source_measure import measured


@functools.cache
def _sandbox() -> Sandbox:
    return open_sandbox("ns")


def _grade(solution: str, files: dict[str, str] | None = None, **hidden: Any) -> Verdict:
    task = Task(key="k", prompt="p", artifacts=("sol.py",), hidden=hidden, files=files or {})
    return grade(task, files={"sol.py": dedent(solution).encode()}, answer=None, sandbox=_sandbox())


def _suite(
    tests: str, solution: str, framework: Any = "script", files: dict[str, str] | None = None, **options: Any
) -> Verdict:
    suite = Suite(framework=framework, files={"test_it.py": dedent(tests)}, **options)
    return _grade(solution, files, kind="suite", suite=suite)


def test_a_program_that_a_test_starts_imports_the_solution() -> None:
    tests = """
        import subprocess, sys
        def test_main():
            command = [sys.executable, "-m", "sol", "3"]
            assert subprocess.run(command, capture_output=True, text=True).stdout == "4\\n"
    """
    solution = "import sys\nif __name__ == '__main__': print(int(sys.argv[1]) + 1)"
    assert _suite(tests, solution, "pytest").reward == 1.0
    assert _suite(tests, solution.replace("+", "-"), "pytest").reward == 0.0


# ------------------------------------------------------------- exceptions that tell a runner to look away

UNITTEST = """
    import unittest, sol
    class T(unittest.TestCase):
        def test_plain(self): self.assertEqual(sol.f(1), 2)
        def test_parts(self):
            for n in range(3):
                with self.subTest(n=n): self.assertEqual(sol.f(n), n + 1)
"""
PYTEST = "import sol\ndef test_plain(): assert sol.f(1) == 2\ndef test_more(): assert sol.f(2) == 3\n"
LEAVE = {
    "_ShouldStop": "import unittest.case\ndef f(x): raise unittest.case._ShouldStop",
    "_ShouldStop's subclass": "import unittest.case\nclass Stop(unittest.case._ShouldStop): pass\ndef f(x): raise Stop",
    "_ShouldStop in one test alone": "import unittest.case\ndef f(x):\n    if x == 1: raise unittest.case._ShouldStop\n    return x + 1",
    "SkipTest": "import unittest\ndef f(x): raise unittest.SkipTest",
    "xfail": "import pytest\ndef f(x): pytest.xfail('later')",
    "XFailed": "import pytest\ndef f(x): raise pytest.xfail.Exception('later')",
    "pytest.skip": "import pytest\ndef f(x): pytest.skip('later')",
    "pytest.exit": "import pytest\ndef f(x): pytest.exit('done', 0)",
    "Skipped by its module": "import _pytest.outcomes\ndef f(x): raise _pytest.outcomes.Skipped('x')",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "GeneratorExit": "def f(x): raise GeneratorExit",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "os._exit": "import os\ndef f(x): os._exit(0)",
    "a group of skips": "import unittest\ndef f(x): raise BaseExceptionGroup('g', [unittest.SkipTest(), SystemExit(0)])",
    "StopIteration": "def f(x): raise StopIteration",
    "CancelledError": "import asyncio\ndef f(x): raise asyncio.CancelledError",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0",
    "thread": "import os, threading\ndef f(x):\n    threading.Thread(target=lambda: os._exit(0)).start()\n    return 0",
}  # fmt: skip


@pytest.mark.some(6)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "apart"])
@pytest.mark.parametrize("framework", ["unittest", "pytest"])
@pytest.mark.parametrize("way", LEAVE)
def test_leaving_is_no_pass(way: str, framework: str, strict: bool) -> None:
    for tests in [UNITTEST] if framework == "unittest" else [PYTEST, UNITTEST][: 1 + strict]:
        verdict = _suite(tests, LEAVE[way], framework, strict=strict)
        assert verdict.reward == 0.0, verdict.checks


@pytest.mark.slow
def test_what_tests_expect_of_a_runner_still_passes() -> None:
    tests = """
        import unittest, sol
        class T(unittest.TestCase):
            @unittest.expectedFailure
            def test_known(self): self.assertEqual(sol.f(1), 3)
            @unittest.expectedFailure
            def test_known_part(self):
                with self.subTest(): self.assertEqual(sol.f(1), 3)
            @unittest.skip('not here')
            def test_skipped(self): self.fail()
            def test_parts(self):
                self.addCleanup(sol.f, 1)
                for n in range(3):
                    with self.subTest(n=n): self.assertEqual(sol.f(n), n + 1)
    """
    for strict in (True, False):
        assert _suite(tests, "def f(x): return x + 1", "unittest", strict=strict).reward == 1.0
    marked = "import pytest, sol\n@pytest.mark.xfail\ndef test_a(): assert sol.f(1) == 3\ndef test_b(): assert sol.f(1) == 2\n"
    assert _suite(marked, "def f(x): return x + 1", "pytest", strict=True).reward == 1.0


SWALLOWED = {
    "an assertion in a context": (
        "from sol import f\nwith f() as x:\n    assert x == 1\n",
        "class C:\n    def __enter__(self): return 0\n    def __exit__(self, *a): return True\ndef f(): return C()",
    ),
    "an error of a test in a context": (
        "from sol import f\nwith f() as x:\n    assert x['a'] == 1\n",
        "import contextlib\n@contextlib.contextmanager\ndef f():\n    try: yield {}\n    except BaseException: pass",
    ),
    "an assertion in an asynchronous context": (
        "import asyncio\nfrom sol import f\nasync def main():\n    async with f() as x:\n        assert x == 1\nasyncio.run(main())\nassert True\n",
        "class C:\n    async def __aenter__(self): return 0\n    async def __aexit__(self, *a): return True\ndef f(): return C()",
    ),
    "an assertion in a function that was passed": (
        "from sol import f\ndef check(x): assert x == 1\nf(check)\nassert True\n",
        "def f(g):\n    try: g(0)\n    except AssertionError: pass",
    ),
    "a loop that ends early": (
        "from sol import f\nassert all(map(lambda x: f(x) == x + 1, [1, 2, 3]))\n", "def f(x): raise StopIteration",
    ),
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("way", SWALLOWED)
def test_what_an_assertion_found_is_not_swallowed(way: str) -> None:
    tests, solution = SWALLOWED[way]
    assert _suite(tests, solution).reward == 0.0


# ----------------------------------------------------------------------- values that claim to be others

CLAIMS = {
    "record that is equal to everything": "class R:\n    def __eq__(self, o): return True\n    def __hash__(self): return 0\ndef f(x): return R()",
    "record that is true": "class R:\n    def __bool__(self): return True\n    def __len__(self): return 2\n    def __eq__(self, o): return o == 2\ndef f(x): return R()",
    "metaclass that takes every instance": "class M(type):\n    def __instancecheck__(cls, o): return True\n    def __eq__(cls, o): return True\n    __hash__ = type.__hash__\nclass R(metaclass=M): pass\ndef f(x): return R",
    "another class": "class R:\n    __class__ = int\n    def __eq__(self, o): return True\ndef f(x): return R()",
    "int with another text": "class I(int):\n    def __repr__(self): return '2'\n    __str__ = __repr__\n    def __eq__(self, o): return o == 2\n    __hash__ = int.__hash__\ndef f(x): return I(0)",
    "enumeration with two values": "import enum\nclass E(enum.IntEnum):\n    A = 0\n    def __eq__(self, o): return o == 2\n    __hash__ = int.__hash__\ndef f(x): return E.A",
    "named tuple with methods": "from collections import namedtuple\nclass P(namedtuple('P', 'x')):\n    def __eq__(self, o): return True\n    __hash__ = tuple.__hash__\ndef f(x): return P(0)",
    "mock.ANY": "from unittest import mock\ndef f(x): return mock.ANY",
    "dict that holds everything": "class D(dict):\n    def __missing__(self, k): return 2\n    def __eq__(self, o): return True\ndef f(x): return D()",
    "numpy object": "import numpy as np\nclass E:\n    def __eq__(self, o): return True\ndef f(x): return np.array(E(), dtype=object)",
    "exception": "class E(Exception):\n    def __eq__(self, o): return True\ndef f(x): return E(2)",
    "a dataclass's comparison of its own": "import dataclasses\n@dataclasses.dataclass(eq=False)\nclass D:\n    x: int = 2\n    def __eq__(self, o): return True\ndef f(x): return D()",
    "a property that counts": "class R:\n    n = 0\n    @property\n    def real(self): return 2\n    def __add__(self, o): return 2\n    __radd__ = __add__\ndef f(x): return R()",
    "Decimal's subclass": "import decimal\nclass D(decimal.Decimal):\n    def __eq__(self, o): return True\n    __hash__ = decimal.Decimal.__hash__\ndef f(x): return D(0)",
    "a date that is any": "import datetime\nclass D(datetime.date):\n    def __eq__(self, o): return True\n    __hash__ = datetime.date.__hash__\ndef f(x): return D(1, 1, 1)",
    "a range that never ends": "class L(list):\n    def __iter__(self):\n        while True: yield 2\n    def __eq__(self, o): return True\ndef f(x): return L()",
    "awaited equality": "class A:\n    def __await__(self): yield\n    def __eq__(self, o): return True\ndef f(x): return A()",
}  # fmt: skip
VALUES = {
    "script": "from sol import f\nx = 1\nassert f(x) == 2\n",
    "table": "from sol import f\nassert f(1) == 2\n",
    "unittest": "import unittest, sol\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(2, sol.f(1))\n",
}


@pytest.mark.some(3)
@pytest.mark.parametrize("way", CLAIMS)
def test_a_value_that_claims_to_be_another_earns_nothing(way: str) -> None:
    for kind, tests in VALUES.items():
        verdict = _suite(tests, CLAIMS[way], "unittest" if kind == "unittest" else "script")
        assert verdict.reward == 0.0, (kind, verdict)
    case = Case(args=[1], expected=2)
    verdict = _grade(CLAIMS[way], kind="cases", entry_point="f", cases=(case,))
    assert verdict.reward == 0.0
    if "return True" in CLAIMS[way] and way not in (
        "numpy object",
        "metaclass that takes every instance",
        "exception",
        "awaited equality",
        "record that is true",
    ):
        assert [t.kind for t in verdict.tampering] == ["not_plain"]


FAR = {
    "a name of five million letters": "def f(x): return type('E' * 5_000_000, (), {})()",
    "a name that is no name": "class E: pass\nE.__name__ = 'a b'\ndef f(x): return E()",
    "no module": "class E(Exception): pass\nE.__module__ = None\ndef f(x): raise E(1)",
    "two hundred generations": "E = Exception\nfor i in range(200): E = type(f'E{i}', (E,), {})\ndef f(x): raise E(1)",
    "groups within groups": "def f(x):\n    e = ValueError(1)\n    for _ in range(500): e = ExceptionGroup('g', [e])\n    raise e",
    "a cause of its own cause": "def f(x):\n    e, k = ValueError(1), KeyError(2)\n    e.__cause__, k.__cause__ = k, e\n    raise e",
    "a text that exits": "class E(Exception):\n    def __str__(self): raise SystemExit\ndef f(x): raise E(1)",
    "a property that exits": "import os\nclass E:\n    @property\n    def x(self): os._exit(0)\ndef f(x): return E()",
    "an array beyond any message": "import numpy as np\ndef f(x): return np.zeros(20_000_000)",
    "ten thousand attributes": "class A: pass\ndef f(x):\n    a = A()\n    for i in range(10_000): setattr(a, f'x{i}', i)\n    return a",
    "fields of one name": "class P(tuple):\n    _fields = ('a', 'a')\ndef f(x): return P((1, 2))",
    "a nesting of objects": "class A: pass\ndef f(x):\n    a = None\n    for _ in range(10_000):\n        b = A()\n        b.a, a = a, b\n    return a",
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("way", FAR)
def test_a_value_far_from_any_use_is_the_solutions_failure(way: str) -> None:
    verdict = _suite(VALUES["script"], FAR[way])
    assert verdict.reward == 0.0, verdict
    assert len(verdict.model_dump_json()) < 4000


# ----------------------------------------------------------------------------------- names by a star


def test_a_comparison_from_another_star_import_is_not_the_solutions() -> None:
    tests = "from math import *\nfrom sol import *\nx = 1\nassert isclose(f(x), 2)\n"
    forged = "def isclose(*a, **k): return True\ndef f(x): return 0\n__all__ = ['isclose', 'f']\n"
    assert _suite(tests, forged).reward == 0.0
    assert _suite(tests, "def f(x): return 2").reward == 1.0
    helper = {"helper.py": "from math import *\ndef same(a, b): return a == b\n"}
    tests = "from sol import *\nfrom helper import *\nx = 1\nassert same(f(x), 2) and isclose(f(x), 2)\n"
    forged = "def same(a, b): return True\nisclose = same\ndef f(x): return 0\n"
    assert _suite(tests, forged, files=helper).reward == 0.0
    assert _suite(tests, "def f(x): return 2", files=helper).reward == 1.0


def test_with_names_given_a_star_import_gives_no_other() -> None:
    tests = "from sol import *\nx = 1\nassert equal(f(x), 2)\n"
    forged = "def equal(a, b): return True\ndef f(x): return 0\n"
    original = {"sol.py": "def equal(a, b): return a == b\ndef f(x): ...\n"}
    assert _suite(tests, forged, files=original, names=("f",)).reward == 0.0
    assert _suite(tests, "def f(x): return 2", files=original, names=("f",)).reward == 1.0
    assert _suite(tests, forged, names=("f",)).reward == 0.0


def test_names_that_a_match_binds_are_the_tests_own() -> None:
    text = "from sol import *\nmatch f(1):\n    case [same, *rest] if same(rest): pass\n    case {**others}: others\n"
    assert used_names({"t.py": text}, "sol.py") == {"f"}


# -------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("given", "expected"),
    [("16", "0x10"), ("0x10", "16"), ("0x10", 16), ("0b11", 3), ("1_000", 1000), ("1_000", "1000"), ("１", 1),
     ("٣", 3), ("[0x10]", [16]), ("[0x10]", "[16]"), ("+5", 5), ("007", 7), ("1e3", "1000.0"), ("1.0", "1"),
     (r"'\x41'", "A"), ("(1, 2)", "[1, 2]"), ("[1 2]", "[12]"), ("['1']", "[1]"), ("'a' 'b'", "ab"),
     ("b'a'", "a"), ("['a','b']", "['a b']"), ("True", "1"), ("1 + 1", 2), ("1j", "1J")],
)  # fmt: skip
def test_the_question_in_another_notation_is_no_answer(given: str, expected: Any) -> None:
    assert not same_answer(given, expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("1e-5", 1e-5), ("-3", -3), ("{'a': 1}", {"a": 1}), (r"['it\'s']", '["it\'s"]'), ("null", None),
     ("None", None), ("'a b'", "a b"), ("[-1.5,2]", [-1.5, 2]), ('{"a":[1, "b"]}', "{'a': [1, 'b']}"), ("3.50", 3.5)],
)  # fmt: skip
def test_layout_and_quotes_are_no_part_of_an_answer(given: str, expected: Any) -> None:
    assert same_answer(given, expected)


BIG = 9007199254740993


@pytest.mark.parametrize(
    ("cell", "expected"),
    [(str(BIG - 1), BIG), (f"{BIG - 1}.0", BIG), (str(BIG), float(BIG)), ("1_000", 1000), ("１", 1), ("٣", 3), (" 1", 1),
     ("1 ", 1), ("1\n", 1), ("+1", 1), ("01", 1), ("nan", 1), ("inf", 1), ("1e999999999", 1), ("0x10", 16), ("1,000", 1000),
     (".5", 0.5), ("1.", 1), ("\ufeff1", 1), ("tRUE", True), ("1", True), ("null", None), ("True", "true"),
     ("2024-1-1", "2024-01-01"), ("9" * 5000, 9), ("0.30000000000000001", 0.30000000000000004)],
)  # fmt: skip
def test_a_cell_that_reads_almost_as_the_number_is_another(cell: str, expected: Any) -> None:
    assert not _same_cells(cell, expected)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [(str(BIG), BIG), ("14.0", 14), ("2.50", 2.5), ("-0.5", -0.5), ("1e3", 1000), ("0.10000000000000001", 0.1),
     ("1E+22", 1e22), ("TRUE", True), ("false", False), ("", None), ("x", "x")],
)  # fmt: skip
def test_a_cell_is_the_number_that_it_spells(cell: str, expected: Any) -> None:
    assert _same_cells(cell, expected)


# -------------------------------------------------------------------------------------------- metrics

TEXT = "'def f(x):\\n    y = x\\n    y = y + 1\\n    return y'"
HIDING = {
    "exec by its module": f"import builtins\nn = {{}}\nbuiltins.exec({TEXT}, n)\nf = n['f']",
    "exec by another name": f"from builtins import exec as run\nn = {{}}\nrun({TEXT}, n)\nf = n['f']",
    "exec by a computed name": f"import builtins\nn = {{}}\ngetattr(builtins, 'ex' + 'ec')({TEXT}, n)\nf = n['f']",
    "exec through a module that has it": f"import enum\nn = {{}}\nenum.bltns.exec({TEXT}, n)\nf = n['f']",
    "exec by a table of names": f"n = {{}}\n(lambda: 0).__globals__['__builtins__']['exec']({TEXT}, n)\nf = n['f']",
    "exec by subclasses": f"n = {{}}\nc = [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]\nc.__init__.__globals__['__builtins__']['exec']({TEXT}, n)\nf = n['f']",
    "exec in a function that hides it": f"def g(exec): return exec\nn = {{}}\nexec({TEXT}, n)\nf = n['f']",
    "exec by a computed attribute": f"n = {{}}\ndef g(): pass\nb = getattr(g, '__glo' + 'bals__')['__builtins__']\n(b if type(b) is dict else vars(b))['ex' + 'ec']({TEXT}, n)\nf = n['f']",
    "timeit": f"import timeit\nn = {{}}\ntimeit.timeit({TEXT}, number=1, globals=n)\nf = lambda x: x + 1",
    "marshal and FunctionType": "import marshal\nfrom types import FunctionType\nf = FunctionType(marshal.loads(marshal.dumps((lambda x: x + 1).__code__)), {})",
    "ctypes": "import ctypes\nctypes.pythonapi.PyRun_SimpleString(b'x = 1')\ndef f(x): return x + 1",
    "code": f"import code\ni = code.InteractiveInterpreter()\ni.runsource({TEXT})\nf = lambda x: i.locals['f'](x)",
    "runpy": f"import runpy\nopen('/work/m.py', 'w').write({TEXT})\nf = runpy.run_path('/work/m.py')['f']",
    "a module that it writes": f"open('/work/m.py', 'w').write({TEXT})\nfrom m import f",
    "a module that it writes, by importlib": f"import importlib\nopen('/work/m.py', 'w').write({TEXT})\nf = importlib.import_module('m').f",
    "pickle": "import pickle\nn = {}\npickle.loads(b\"cbuiltins\\nexec\\n(S'x = 1'\\ntR.\")\ndef f(x): return x + 1",
    "subprocess": "import subprocess, sys\ndef f(x): return int(subprocess.run([sys.executable, '-c', f'print({x} + 1)'], capture_output=True).stdout)",
    "os.popen": "import os, sys\ndef f(x): return int(os.popen(f'{sys.executable} -c \"print({x} + 1)\"').read())",
    "sqlite3": "import sqlite3\ndef f(x): return sqlite3.connect(':memory:').execute('select ? + 1', (x,)).fetchone()[0]",
    "annotations": "import typing\ndef g(x: 'lambda x: x + 1'): pass\nf = typing.get_type_hints(g)['x']",
    "fields that are code": "import dataclasses\nC = type('C', (), {'__annota' + 'tions__': {'x: int = [print][0], y': int}})\ndataclasses.dataclass(C)\ndef f(x): return x + 1",
    "ast": f"import ast\nn = {{}}\nfor run in [eval]: run(compile(ast.parse({TEXT}), 'x', 'exec'), n)\nf = n['f']",
    "another encoding": "# coding: utf-7\n# +AAo-def f(x):+AAo-    y +AD0- x+AAo-    exec('')+AAo-    return y +- 1+AAo-",
    "codeop by map": f"n = {{}}\nlist(map(exec, [{TEXT}], [n]))\nf = n['f']",
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("way", HIDING)
def test_code_that_is_hidden_from_a_bound_earns_nothing(way: str) -> None:
    bound = Metric(name="branches", at_most=10)
    case = Case(args=[1], expected=2)
    verdict = _grade(HIDING[way], kind="cases", entry_point="f", cases=(case,), metrics=(bound,))
    assert verdict.reward == 0.0, verdict
    assert {t.kind for t in verdict.tampering} & {
        "hidden_code",
        "exit",
        "child_killed",
    } or way == "a module that it writes"


MEASURED_FAIRLY = {
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 0\ndef f(x): return dataclasses.replace(C(x), x=x + 1).x",
    "namedtuple": "from collections import namedtuple\nP = namedtuple('P', 'x')\ndef f(x): return P(x + 1).x",
    "single dispatch": "from __future__ import annotations\nimport functools\n@functools.singledispatch\ndef f(x): raise TypeError\n@f.register\ndef _(x: int): return x + 1",
    "names like the forbidden ones": "import re\nclass compile:\n    def eval(self, x): return x + 1\ndef f(x): return compile().eval(x) if re.compile('a') else 0",
    "literals": "import ast\ndef f(x): return ast.literal_eval(str(x)) + 1",
    "libraries": "import sys, os, math, heapq, decimal, statistics, asyncio, string, contextlib, typing\nimport collections.abc\nsys.setrecursionlimit(5000)\ndef f(x): return int(os.path.basename(str(x))) + 1",
    "an error that is printed": "import traceback\ndef f(x):\n    try: 1 / 0\n    except ZeroDivisionError: traceback.format_exc()\n    return x + 1",
    "enumerations and protocols": "import enum\nfrom typing import NamedTuple, Protocol, Optional\nclass E(enum.Enum):\n    A = 1\nclass N(NamedTuple):\n    x: 'Optional[int]' = None\ndef f(x): return E.A.value + N(x).x",
    "copies": "import copy\nclass A:\n    def __init__(self, x): self.x = x\ndef f(x): return copy.deepcopy(A(x)).x + 1",
    "numpy": "import numpy as np\ndef f(x): return int(np.int64(x) + 1)",
}  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize("way", MEASURED_FAIRLY)
def test_what_is_plainly_written_keeps_a_bound(way: str) -> None:
    bounds = tuple(Metric(name=name, at_most=50) for name in ("statements", "branches", "nesting", "lines"))
    cases = tuple(Case(args=[n], expected=n + 1) for n in (1, 2))
    verdict = _grade(MEASURED_FAIRLY[way], kind="cases", entry_point="f", cases=cases, metrics=bounds)
    assert (verdict.reward, verdict.tampering) == (1.0, ()), verdict


PLAINLY = "def f(x):\n    '''Add.'''\n    y = x\n    y = y + 1\n    return y\n"


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    '''Add.'''\n    '';y = x\n    '';y = y + 1\n    '';return y\n",
        "def f(x):\n    '''Add.'''\n    y = x; y = y + 1; return y\n",
        "def f(x): '''Add.'''; y = x; y = y + 1; return y\n",
        "f = lambda x: [y := x, y := y + 1, y][-1]\n",
        "def f(x, y=0):\n    return [y := x, y := y + 1] and y\n",
        "def f(x):\n    '''Add.'''\n    y \\\n    = x\n    y = y \\\n    + 1\n    return y\n",
    ],
)
def test_layout_hides_no_statement(text: str) -> None:
    plain, hidden = measured({"a.py": PLAINLY}), measured({"a.py": text})
    assert plain is not None
    assert hidden is not None
    assert hidden["statements"] >= plain["statements"]
    assert hidden["lines"] >= plain["lines"] or ":=" in text


def test_what_another_encoding_hides_in_a_comment_is_counted() -> None:
    found = measured({"a.py": "# coding: utf-7\n# +AAo-x = 1+AAo-y = 2\n"})
    assert found is not None
    assert found["statements"] == 2


def test_a_line_too_long_to_read_is_several() -> None:
    found = measured({"a.py": f"f = lambda x: {' + '.join(['x'] * 200)}\n"})
    assert found is not None
    assert found["lines"] >= 8


def test_a_definition_inside_a_block_hides_no_block() -> None:
    deep = "for a in x:\n    def g():\n        for b in a:\n            def h():\n                for c in b: pass\n"
    found = measured({"a.py": deep})
    assert found is not None
    assert found["nesting"] == 3
