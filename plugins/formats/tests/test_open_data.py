"""Fairness on published tasks: references earn 1 in every honest dress, starters do not.

The rows of the quick tests are made here. With NANO_TASKS_DIR naming a folder of published rows, every one of
them is graded too (slow); NANO_TASKS_PART="i/n" takes every n-th row from the i-th on.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_rl.tasks.task_file import read_tasks
from nano_shared.types import Task, Verdict

REFACTORING = ("exercism-python/ledger", "exercism-python/markdown")
"""their starters work; what is asked for is better code"""


@functools.cache
def _sandbox() -> Sandbox:
    return open_sandbox("ns")


def _reference(task: Task) -> str:
    assert task.oracle is not None
    return str(
        task.oracle[0].arguments["answer" if task.hidden and task.hidden.kind == "answer" else "content"]
    )


def _grade(task: Task, text: str) -> Verdict:
    files = {name: text.encode() for name in task.artifacts}
    return grade(task, files=files, answer=None if task.artifacts else text, sandbox=_sandbox())


def _noisy(text: str) -> str:
    """Prints and warns on import, and writes to stderr in every function, 300 times in all.

    Not more often: a call made at the recursion limit changes the message of the error, in plain Python too.
    """
    tree = _parsed(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            noise = ast.parse("if _noise: __import__('sys').stderr.write(_noise.pop())").body
            at = int(ast.get_docstring(node) is not None)
            node.body[at:at] = noise
    at = next(
        (i for i, n in enumerate(tree.body) if not (isinstance(n, ast.Expr) or _is_future(n))), len(tree.body)
    )
    tree.body[at:at] = ast.parse(
        "import warnings as _w\nprint('hello')\n_w.warn('old')\n_noise = ['noise\\\\n'] * 300"
    ).body
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


class _Renamed(ast.NodeTransformer):
    """Local variables of plain functions under other names."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        inner = any(
            isinstance(n, ast.FunctionDef | ast.Lambda | ast.Global | ast.Nonlocal | ast.ClassDef)
            for n in ast.walk(node)
            if n is not node
        )
        if not inner:
            names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            names -= {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
            for n in ast.walk(node):
                if isinstance(n, ast.Name) and n.id in names:
                    n.id = f"renamed_{n.id}"
        return node


def _parsed(text: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # some have escapes that Python warns of
        return ast.parse(text)


def _renamed(text: str) -> str:
    return ast.unparse(_Renamed().visit(_parsed(text)))


def _reformatted(text: str) -> str:
    return ast.unparse(_parsed(text))


def _slow(text: str) -> str:
    return f"{text}\n\nimport time as _time\n_time.sleep(0.3)\n"


DRESSES: dict[str, Callable[[str], str]] = {
    "as it is": str, "reformatted": _reformatted, "renamed locals": _renamed, "noisy": _noisy, "slow": _slow,
}  # fmt: skip

_TESTS = {
    "script": "from solution import *\nassert f([3, 1]) == [1, 3]\nassert math.sqrt(4) == 2\n",
    "unittest": "import solution as m, unittest\nclass T(unittest.TestCase):\n"
    "    def test_it(self): self.assertEqual(m.f([3, 1]), [1, 3])\n",
    "pytest": "import pytest\nfrom solution import f, Empty\ndef test_it():\n    assert f([3, 1]) == [1, 3]\n"
    "def test_error():\n    with pytest.raises(Empty, match='none'): f([])\n",
}
_SOLUTION = (
    "import math\n\n\nclass Empty(Exception):\n    pass\n\n\ndef f(xs):\n    '''Sorted.'''\n    if not xs:\n"
    "        raise Empty('none')\n    held = list(xs)\n    for i in range(len(held)):\n"
    "        j = held.index(min(held[i:]), i)\n        held[i], held[j] = held[j], held[i]\n    return held\n"
)


def _made(runner: str, folder: Path) -> Task:
    row = {
        "id": f"made/{runner}", "source": "made", "kind": "implement", "prompt": "Sort.", "files": {},
        "target": "solution.py", "reference_solution": _SOLUTION,
        "tests": {"runner": runner, "files": {"check_solution.py": _TESTS[runner]}},
    }  # fmt: skip
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return read_tasks(path)[0]


@pytest.mark.some(2)
@pytest.mark.parametrize("runner", _TESTS)
@pytest.mark.parametrize("dress", DRESSES)
def test_an_honest_solution_earns_one_in_every_dress(runner: str, dress: str, tmp_path: Path) -> None:
    verdict = _grade(_made(runner, tmp_path), DRESSES[dress](_SOLUTION))
    assert (verdict.reward, verdict.tampering) == (1.0, ()), verdict


@pytest.mark.parametrize("runner", _TESTS)
def test_a_starter_and_nothing_earn_less(runner: str, tmp_path: Path) -> None:
    task = _made(runner, tmp_path)
    for text in ("", "def f(xs):\n    pass\n"):
        assert _grade(task, text).reward == 0.0


def _published() -> list[Task]:
    folder = os.environ.get("NANO_TASKS_DIR")
    if not folder:
        pytest.skip("NANO_TASKS_DIR names no folder of published rows")
    tasks = [task for path in sorted(Path(folder).glob("*.jsonl")) for task in read_tasks(path)]
    first, step = map(int, os.environ.get("NANO_TASKS_PART", "0/1").split("/"))
    return tasks[first::step]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("dress", DRESSES)
def test_every_published_reference_earns_one(dress: str) -> None:
    tasks = [task for task in _published() if task.artifacts or dress == "as it is"]
    failed = {
        task.key: v for task in tasks if (v := _grade(task, DRESSES[dress](_reference(task)))).reward != 1.0
    }
    assert failed == {}, f"{len(failed)} of {len(tasks)}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_every_published_starter_earns_less() -> None:
    tasks = [task for task in _published() if task.artifacts and task.key not in REFACTORING]
    passed = [task.key for task in tasks if _grade(task, task.files.get(task.artifacts[0], "")).reward == 1.0]
    assert passed == [], f"{len(passed)} of {len(tasks)}"
