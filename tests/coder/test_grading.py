"""Graders: what is right earns 1, what is wrong or forged earns 0, and a failure of ours earns nothing."""

# ruff: noqa: E501 (programs as one-line literals)
from __future__ import annotations

from pathlib import Path

import pytest

from nano_coder.grading.answer import grade_answer
from nano_coder.grading.cases import grade_cases
from nano_coder.grading.command import grade_command
from nano_coder.grading.compare import same_value
from nano_coder.sandbox import Sandbox, open_sandbox
from nano_shared.blobs import BlobStore
from nano_shared.snapshot import load, snapshot_directory
from nano_shared.types import Case, HiddenChecks, Limits, Task, Trust, Verdict

TASK = Task(key="t", prompt="p", artifacts=("solution.py",), limits=Limits(memory_mb=512, tool_seconds=10))
CHECKS = HiddenChecks(
    kind="cases",
    entry_point="add_all",
    cases=(
        Case(args=[[1, 2, 3]], expected=6),
        Case(args=[[]], expected=0),
        Case(args=[[5, -9]], expected=-4),
    ),
)
RIGHT = "def add_all(xs):\n    return sum(xs)\n"
WRONG = "def add_all(xs):\n    return 6\n"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox()


def grade(source: str, sandbox: Sandbox, *, checks: HiddenChecks = CHECKS, **others: bytes) -> Verdict:
    files = {"solution.py": source.encode(), **{f"{name}.py": data for name, data in others.items()}}
    return grade_cases(checks, TASK, files, sandbox, grader="test")


FAIR = {
    "plain": RIGHT,
    "reformatted": "def add_all( xs ) :\n\tt=0\n\tfor v in xs : t+=v\n\treturn t",
    "prints to stdout": "print('hello')\ndef add_all(xs):\n    print('[]', flush=True)\n    return sum(xs)\n",
    "noisy on stderr": "import sys, warnings\nwarnings.warn('x')\nsys.stderr.write('x' * 10**6)\n" + RIGHT,
    "slow but legal": "import time\ndef add_all(xs):\n    time.sleep(0.3)\n    return sum(xs)\n",
    "imports itself from the workspace": "import solution\n" + RIGHT,
    "leaves a thread behind": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    + RIGHT,
}


@pytest.mark.parametrize("source", FAIR.values(), ids=FAIR)
def test_a_right_solution_earns_one(source: str, sandbox: Sandbox) -> None:
    verdict = grade(source, sandbox)
    assert verdict.reward == 1.0
    assert (verdict.components, verdict.trust, verdict.tampering) == ({"tests": 1.0}, Trust.HIDDEN, ())


HACKS = {
    "wrong": WRONG,
    "no function": "x = 1\n",
    "syntax error": "def add_all(:\n",
    "os._exit at import": "import os\nos._exit(0)\n" + WRONG,
    "sys.exit at import": "import sys\nsys.exit(0)\n" + WRONG,
    "SystemExit inside": "def add_all(xs):\n    raise SystemExit(0)\n",
    "exit inside after a forged report": (
        "import os, json\ndef add_all(xs):\n    for fd in range(64):\n        try:\n"
        "            os.write(fd, json.dumps([{'status': 'ok', 'value': 6}] * 3).encode())\n"
        "        except OSError:\n            pass\n    os._exit(0)\n"
    ),
    "object equal to everything": (
        "class E:\n    def __eq__(self, other):\n        return True\n    def __hash__(self):\n        return 0\n"
        "def add_all(xs):\n    return E()\n"
    ),
    "int subclass with its own equality": (
        "class I(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n"
        "def add_all(xs):\n    return I(6)\n"
    ),
    "patched json": 'import json\njson.dumps = lambda v, **k: \'{"status": "ok", "value": 6}\'\n' + WRONG,
    "patched builtins": "import builtins\nbuiltins.all = builtins.any = lambda *a: True\nbuiltins.isinstance = lambda *a: True\n"
    + WRONG,
    "raises": "def add_all(xs):\n    raise ValueError\n",
    "fork, parent exits": "import os\nif os.fork():\n    os._exit(0)\n" + WRONG,
    "lazy value": "def add_all(xs):\n    return (x for x in xs)\n",
    "nan": "def add_all(xs):\n    return float('nan')\n",
    "True for 1": "def add_all(xs):\n    return True\n",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n" + WRONG,
    "floods": "def add_all(xs):\n    return 'x' * 50_000_000\n",
    "eats memory": "def add_all(xs):\n    return len(bytearray(4 * 10**9))\n",
    "looks for the expected values": (
        "import glob\ndef add_all(xs):\n    for path in glob.glob('/**', recursive=True)[:20000]:\n        try:\n"
        "            text = open(path, errors='ignore').read(100000) if path.endswith(('.json', '.py')) else ''\n"
        "        except OSError:\n            continue\n        if '\"expected\"' in text:\n            return 6\n    return None\n"
    ),
    "reads its caller's frames": (
        "import sys\ndef add_all(xs):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in frame.f_locals.values():\n            if isinstance(value, dict) and 'expected' in value:\n"
        "                return value['expected']\n        frame = frame.f_back\n    return None\n"
    ),
    "reads the grader's memory": (
        "import os\ndef add_all(xs):\n    try:\n        return int(open(f'/proc/{os.getppid()}/environ').read())\n"
        "    except (OSError, ValueError):\n        return None\n"
    ),
}


@pytest.mark.parametrize("source", HACKS.values(), ids=HACKS)
def test_a_hack_earns_nothing(source: str, sandbox: Sandbox) -> None:
    assert grade(source, sandbox).reward == 0.0


def test_a_hang_is_a_named_time_out(sandbox: Sandbox) -> None:
    verdict = grade("def add_all(xs):\n    while True: pass\n", sandbox)
    assert (verdict.reward, verdict.failure_kind) == (0.0, "agent_timeout")


def test_killing_the_grader_is_named_as_tampering(sandbox: Sandbox) -> None:
    verdict = grade(HACKS["kills its parent"], sandbox)
    assert [finding.kind for finding in verdict.tampering] == ["grader_stopped"]


def test_cases_share_nothing(sandbox: Sandbox) -> None:
    source = "calls = []\ndef add_all(xs):\n    calls.append(1)\n    xs.append(100)\n    return sum(xs) - 100 if len(calls) == 1 else 0\n"
    assert grade(source, sandbox).reward == 1.0


def test_half_right_is_a_component_not_a_reward(sandbox: Sandbox) -> None:
    verdict = grade(WRONG, sandbox)
    assert verdict.reward == 0.0
    assert verdict.components == {"tests": pytest.approx(1 / 3)}
    assert verdict.checks == {"case_0": "pass", "case_1": "fail", "case_2": "fail"}


def test_a_missing_artifact_is_named(sandbox: Sandbox) -> None:
    verdict = grade_cases(CHECKS, TASK, {}, sandbox, grader="test")
    assert (verdict.reward, verdict.failure_kind) == (0.0, "no_artifact")


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        (1, 1, True), (True, 1, False), (1, 1.0, False), ([1, "a"], [1, "a"], True), ([1], [1, 2], False),
        ({"a": [0]}, {"a": [0]}, True), ({"a": 0}, {"a": False}, False), (None, 0, False), ("1", 1, False),
    ],
)  # fmt: skip
def test_values_are_compared_type_for_type(actual: object, expected: object, same: bool) -> None:
    assert same_value(actual, expected) is same


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("42", 1.0), (" 42\n", 1.0), ("42.0", 0.0), ("", 0.0), (None, 0.0), ("the answer is 42", 0.0)],
)
def test_an_answer_is_compared_as_text_or_as_json(answer: str | None, reward: float) -> None:
    assert grade_answer(HiddenChecks(kind="answer", answer="42"), answer, grader="test").reward == reward


class TestCommand:
    """The user's check: on the original tests plus the diff."""

    BUGGY = "def add(a, b):\n    return a - b\n"
    FIXED = "def add(a, b):\n    return a + b\n"
    TEST = "from m import add\ndef test_add():\n    assert add(2, 2) == 4\n"

    def check(
        self, tmp_path: Path, sandbox: Sandbox, after: dict[str, str], command: str = "python -m pytest -q"
    ) -> Verdict:
        blobs = BlobStore(tmp_path / "blobs")
        trees = []
        for name, files in (("before", {"m.py": self.BUGGY, "test_m.py": self.TEST}), ("after", after)):
            folder = tmp_path / name
            folder.mkdir()
            for path, text in files.items():
                (folder / path).write_text(text)
            trees.append(load(snapshot_directory(folder, blobs), blobs))
        return grade_command(command, TASK, *trees, blobs, sandbox, grader="test", trust=Trust.USER_CHECK)

    def test_a_fix_passes(self, tmp_path: Path, sandbox: Sandbox) -> None:
        verdict = self.check(tmp_path, sandbox, {"m.py": self.FIXED, "test_m.py": self.TEST})
        assert (verdict.reward, verdict.trust, verdict.tampering) == (1.0, Trust.USER_CHECK, ())

    def test_an_edited_test_is_restored_and_reported(self, tmp_path: Path, sandbox: Sandbox) -> None:
        verdict = self.check(tmp_path, sandbox, {"m.py": self.BUGGY, "test_m.py": "def test_add(): pass\n"})
        assert verdict.reward == 0.0
        assert [finding.detail for finding in verdict.tampering] == ["changed test_m.py"]

    def test_a_deleted_test_is_restored_and_reported(self, tmp_path: Path, sandbox: Sandbox) -> None:
        verdict = self.check(tmp_path, sandbox, {"m.py": self.BUGGY})
        assert verdict.reward == 0.0
        assert [finding.detail for finding in verdict.tampering] == ["deleted test_m.py"]

    def test_a_planted_conftest_is_left_out_and_reported(self, tmp_path: Path, sandbox: Sandbox) -> None:
        forged = "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n"
        after = {"m.py": self.BUGGY, "test_m.py": self.TEST, "conftest.py": forged}
        verdict = self.check(tmp_path, sandbox, after)
        assert verdict.reward == 0.0
        assert [finding.detail for finding in verdict.tampering] == ["added conftest.py"]

    def test_a_check_that_does_not_exist_is_named(self, tmp_path: Path, sandbox: Sandbox) -> None:
        verdict = self.check(tmp_path, sandbox, {"m.py": self.FIXED}, command="no-such-check")
        assert (verdict.reward, verdict.failure_kind) == (0.0, "check_not_found")
