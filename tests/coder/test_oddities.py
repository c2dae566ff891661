"""What is unusual and right earns 1; nothing of it is called tampering."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oddities import CASES, SUITES

from nano_coder.grading.grade import grade
from nano_coder.sandbox.protocol import Sandbox, open_sandbox
from nano_shared.hidden_checks import Case, Suite
from nano_shared.types import Task, Verdict


@functools.cache
def _sandbox() -> Sandbox:
    return open_sandbox("ns")


def _grade(solution: str, **hidden: Any) -> Verdict:
    task = Task(key="k", prompt="p", artifacts=("sol.py",), hidden=hidden)
    return grade(task, files={"sol.py": solution.encode()}, answer=None, sandbox=_sandbox())


def _suite(tests: str) -> Suite:
    return Suite(framework="unittest" if "unittest" in tests else "script", files={"test_it.py": tests})


@pytest.mark.some(5)
@pytest.mark.parametrize("way", SUITES)
def test_an_oddity_earns_one_from_tests(way: str) -> None:
    tests, solution = SUITES[way]
    verdict = _grade(solution, kind="suite", suite=_suite(tests))
    assert (verdict.reward, verdict.tampering, verdict.failure_kind) == (1.0, (), None), verdict.checks


@pytest.mark.slow
def test_every_oddity_passes_in_plain_python(tmp_path: Path) -> None:
    for number, (tests, solution) in enumerate(SUITES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "sol.py").write_text(solution)
        (folder / "test_it.py").write_text(tests)
    run = (
        "import os, runpy, subprocess, sys, unittest\n"
        "for n in sorted(os.listdir()):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        sys.path.insert(0, os.path.abspath(n))\n"
        "        names = runpy.run_path(f'{n}/test_it.py')\n"
        "        for case in names.values():\n"
        "            if isinstance(case, type) and issubclass(case, unittest.TestCase):\n"
        "                suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)\n"
        "                assert suite.run(unittest.TestResult()).wasSuccessful(), n\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(pid, 0)[1] == 0, open(f'{n}/test_it.py').read()\n"
    )
    done = subprocess.run([sys.executable, "-c", run], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.mark.some(3)
@pytest.mark.parametrize("way", CASES)
def test_an_oddity_earns_one_from_cases(way: str) -> None:
    solution, expected = CASES[way]
    verdict = _grade(solution, kind="cases", entry_point="f", cases=(Case(args=[3], expected=expected),))
    assert (verdict.reward, verdict.tampering, verdict.failure_kind) == (1.0, (), None)


def test_there_are_many() -> None:
    assert len(SUITES) >= 60
    assert len(CASES) >= 25
