"""Whatever a policy leaves there is a verdict, and no free retry: 0 for its failures, None for ours."""

from __future__ import annotations

import json
import os
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits
from hostile import KEPT, LOST

from nano_coder.grading.grade import grade
from nano_coder.grading.inside.report import DEEPEST, Malformed, read
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.sandbox.namespaces import NsJail
from nano_coder.sandbox.protocol import Jail, Sandbox, open_sandbox
from nano_coder.verify.tokens import expected_hash
from nano_shared.hidden_checks import Case, CaseChecks, Suite, SuiteChecks
from nano_shared.snapshot import Quota, snapshot_directory
from nano_shared.snapshot_change import apply
from nano_shared.types import Limits, OracleAction, StopReason, Task, Trajectory, Trust, Verdict

LIMITS = Limits(memory_mb=512, tool_seconds=60)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("ns")


def _cases(source: str, sandbox: Sandbox, **changes: Any) -> Verdict:
    cases = (Case(args=[[1, 2]], expected=3), Case(args=[[2, 2]], expected=4))
    hidden = CaseChecks(entry_point="add_all", cases=cases)
    task = Task(key="k", prompt="p", artifacts=("sol.py",), hidden=hidden, limits=LIMITS, **changes)
    return grade(task, files={"sol.py": dedent(source).encode()}, answer=None, sandbox=sandbox)


def _suite(
    tests: str,
    source: str,
    sandbox: Sandbox,
    framework: str = "script",
    *,
    strict: bool = False,
    **changes: Any,
) -> Verdict:
    suite = Suite(framework=framework, files={"test_it.py": dedent(tests)}, strict=strict)  # type: ignore[arg-type]
    hidden = SuiteChecks(suite=suite)
    task = Task(key="k", prompt="p", artifacts=("sol.py",), hidden=hidden, limits=LIMITS, **changes)
    return grade(task, files={"sol.py": dedent(source).encode()}, answer=None, sandbox=sandbox)


# --------------------------------------------------------------------------------- forged reports

FORGE = """
import gc, os, sys
def say(text):
    # the fork's own frames hold the token with which it signs, and the pipe
    frame, found = sys._getframe(), {}
    while frame:
        found = {**{k: v for k, v in frame.f_locals.items() if k in ("job", "pipe")}, **found}
        frame = frame.f_back
    data = (found["job"]["token"] + text + "\\n").encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(found["pipe"], data):]
    os._exit(0)
def add_all(xs):
"""
REPORTS = {
    "nested almost as deep as JSON is parsed": """say('{"value": ' + '[' * 985 + ']' * 985 + '}')""",
    "nested as deep as a value may be sent": """say('{"value": ' + '[' * 398 + ']' * 398 + '}')""",
    "objects nested almost as deep": """say('{"value": ' + '{"a": ' * 900 + '1' + '}' * 901)""",
    "a kind that no text can hold": """say('{"not_plain": "\\\\ud800"}')""",
    "a status that no text can hold": """say('{"exit": "\\\\udfff\\\\u001b[2J"}')""",
    "a skip as a list": """say('{"raise": ["SkipTest"]}')""",
    "not an object": """say('[["value", 3]]')""",
    "a number too long to read": """say('{"value": 1' + '0' * 5000 + '}')""",
    "the end, before it": """say('{"done": true}')""",
    "the beginning again": """say('{"ready": true}')""",
    "many keys": """say('{' + ','.join(f'"{i}": 0' for i in range(60000)) + '}')""",
    "a long line of nothing": """say('{"value": "' + 'x' * (3 << 20) + '"}')""",
    "a name of a million letters": """raise type('E' * 900_000, (Exception,), {})""",
    "a name that is not plain text": """return type('E' * 900_000, (), {})()""",
    "NaN under a key": """say('{"value": NaN, "timeout": Infinity}')""",
}


def test_a_forger_is_heard(sandbox: Sandbox) -> None:
    """Otherwise the attacks below are none: it signs a report, and what it says is compared."""
    verdict = _cases(FORGE + "    say('{\"value\": 3}')", sandbox)
    assert verdict.checks == {"case_1": "pass", "case_2": "fail"}
    told = """say('{"check": "forged_name", "state": "pass"}')"""
    assert "forged_name" in _suite(STRICT, FORGE_STRICT + told, sandbox, "unittest", strict=True).checks


@pytest.mark.some(3)
@pytest.mark.parametrize("attack", REPORTS)
def test_a_forged_report_earns_nothing_and_is_no_retry(attack: str, sandbox: Sandbox) -> None:
    verdict = _cases(FORGE + "    " + REPORTS[attack], sandbox)
    assert verdict.reward == 0.0
    assert len(verdict.model_dump_json()) < 4000


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"a":' * 100_000, "[]", "3", "", '{"a": 1' + "0" * 5000 + "}"]
)
def test_what_is_no_report_is_malformed_and_nothing_else(line: str) -> None:
    with pytest.raises(Malformed):
        read(line)


def test_a_report_is_bounded_in_depth_and_length() -> None:
    inner = DEEPEST - 1
    assert read('{"value":' + "[" * inner + "]" * inner + "}")
    with pytest.raises(Malformed, match="deep"):
        read('{"value":' + "[" * (inner + 1) + "]" * (inner + 1) + "}")
    with pytest.raises(Malformed, match="long"):
        read('{"value": "' + "x" * (2 << 20) + '"}')


# ------------------------------------------------------------- solutions beside tests in other jails

USES = "from sol import f, g\nassert g(f(1)) == 2\n"
SUITES = {
    "an exception's class in place of a function": ("class f(Exception): pass\ndef g(x): return 3", USES),
    "a builtin exception in place of a function": ("f = ValueError\ndef g(x): return 3", USES),
    "a module in place of a value": (
        "import math as f\ndef g(x): return 3", "from sol import f, g\nassert g(f) == 2\n",
    ),
    "an exception that it raised": (
        "def f(x): raise KeyError(x)\ndef g(x): return 3",
        "from sol import f, g\ntry:\n    f(1)\nexcept Exception as e:\n    assert g(e) == 2\n",
    ),
    "nested until it can go no deeper": (
        "def f(x): return [x]\ndef g(x): return 3",
        "from sol import f, g\nx = 1\nfor _ in range(200): x = [f(x)]\nassert g(x) == 2\n",
    ),
    "arguments changed until they can go no deeper": (
        "def f(x):\n    x[:] = [list(x)]\n    return 3\ng = f",
        "from sol import f, g\nx = []\nfor _ in range(300): f(x)\nassert f([x]) == 2\n",
    ),
    "a name of a million letters when imported": (
        "raise type('E' * 30_000_000, (Exception,), {})", USES,
    ),
    "a skip whose name no text holds": (
        "def f(x): raise type('Skipped', (Exception,), {})('\\ud800')\ndef g(x): return 3", USES,
    ),
    "memory of the tests' jail": (
        "import collections\ndef f(x): return [collections.deque() for _ in range(1_000_000)]\ng = len",
        "from sol import f, g\nxs = [f(1) for _ in range(12)]\nassert g(1) == 2 and len(xs[0]) == 3\n",
    ),
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("attack", SUITES)
def test_what_a_solution_does_to_its_tests_is_its_own_failure(attack: str, sandbox: Sandbox) -> None:
    source, tests = SUITES[attack]
    verdict = _suite(tests, source, sandbox)
    assert verdict.reward == 0.0, verdict
    assert len(verdict.model_dump_json()) < 4000


STRICT = """
import unittest
from sol import f
class T(unittest.TestCase):
    def test_f(self): self.assertEqual(f(1), 2)
"""
FORGE_STRICT = """
import os, sys
def say(text):
    frame, found = sys._getframe(), {}
    while frame:
        found = {**{k: v for k, v in frame.f_locals.items() if k in ("pipe", "token")}, **found}
        frame = frame.f_back
    os.write(found["pipe"], (found["token"] + text + "\\n").encode("utf-8", "surrogatepass"))
def f(x):
    return 1
"""
STRICTS = {
    "nested almost as deep as JSON is parsed": """say('{"collected": ' + '[' * 980 + ']' * 980 + '}')""",
    "nested beyond": """say('{"collected": ' + '[' * 100000 + ']' * 100000 + '}')""",
    "no object": """say('5')""",
    "names that are numbers": """say('{"collected": [1, [2], {}]}')""",
    "a number of names": """say('{"collected": 7}')""",
    "a check without a state": """say('{"check": "test_f"}')""",
    "a check that no dict can hold": """say('{"check": ["test_f"], "state": "pass"}')""",
    "an unheard-of state": """say('{"check": "test_f", "state": "\\\\ud800"}')""",
    "patched by numbers": """say('{"done": 1, "patched": [1, 2]}')""",
    "an end of its own": """say('{"ended": 5}'); os._exit(0)""",
    "seconds that are a text": """say('{"cpu_s": "x", "ended": {"exit": 0}}'); os._exit(0)""",
}


@pytest.mark.some(2)
@pytest.mark.parametrize("attack", STRICTS)
def test_a_report_forged_beside_strict_tests_earns_nothing(attack: str, sandbox: Sandbox) -> None:
    verdict = _suite(STRICT, FORGE_STRICT + STRICTS[attack], sandbox, "unittest", strict=True)
    assert verdict.reward == 0.0


def test_objects_of_the_tests_are_passed_beside_the_solution(sandbox: Sandbox) -> None:
    tests = "from sol import f\nclass A: pass\nassert f(A()) == 1\n"
    oracle = (
        OracleAction(name="write_file", arguments={"path": "sol.py", "content": "def f(a): return 1\n"}),
    )
    for known in ({}, {"oracle": oracle}):
        verdict = _suite(tests, "def f(a): return 1\n", sandbox, **known)
        assert (verdict.reward, verdict.trust) == (1.0, Trust.STRICT)


# ------------------------------------------------------------------------------ hostile workspaces


def _ruined(source: str, folder: Path, first: tuple[str, ...] = ()) -> tuple[Trajectory, Runtime]:
    """A run whose policy does `source` to its workspace, and the run's runtime."""
    cases = (Case(args=[1], expected=2), Case(args=[2], expected=3))
    task = a_task(
        files={"a.py": "def f(x): return x\n"},
        artifacts=("a.py",),
        limits=limits(memory_mb=1024),
        hidden=CaseChecks(entry_point="f", cases=cases),
    )
    runtime = a_runtime(folder, [*first, act("python", code=source), act("shell", command="ls"), SUBMIT])
    return grade_run(run_task(task, runtime), runtime), runtime


@pytest.mark.some(3)
@pytest.mark.parametrize(
    "attack", [pytest.param(a, marks=pytest.mark.slow) if a == "a full disk" else a for a in [*LOST, *KEPT]]
)
def test_a_hostile_workspace_is_seen_and_earns_nothing(attack: str, tmp_path: Path) -> None:
    run, runtime = _ruined((LOST | KEPT)[attack], tmp_path)
    assert run.stop == (StopReason.GAVE_UP if attack in LOST else StopReason.FINISHED)
    assert run.reward == 0.0, run.verdict
    seen = run.turns[0].observations[0]
    assert run.workspace_lost == (attack in LOST)
    assert seen.text.startswith("error: the workspace cannot be kept: ") == (attack in LOST)
    assert runtime.store.get(run.id) == run
    assert json.loads(run.model_dump_json())
    if run.verdict is not None and not run.workspace_lost:
        assert expected_hash(run, runtime.store.blobs) == run.verdict.graded_hash


def test_a_project_with_names_of_no_encoding_is_worked_on_logged_and_graded(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.py").write_text("def f(x): return x\n")
    for name in (b"caf\xe9.txt", b"\xff\ndir"):
        Path(os.fsdecode(os.path.join(os.fsencode(project), name))).write_bytes(b"old\n")
    texts = [act("shell", command="for f in caf*; do echo new > $f; done; ls"), SUBMIT]
    runtime = a_runtime(tmp_path, texts)
    start = snapshot_directory(project, runtime.store.blobs)
    task = a_task(files={}, snapshot=start, check="grep new caf*")
    run = grade_run(run_task(task, runtime), runtime)
    assert (run.stop, run.reward) == (StopReason.FINISHED, 1.0)
    assert run.turns[0].observations[0].files_changed == ("caf\\xe9.txt",)
    assert runtime.store.get(run.id) == run
    assert "caf\\351.txt" in run.diff
    changed = apply(start, str(run.last_snapshot), runtime.store.blobs, project)
    assert [os.fsencode(name) for name in changed] == [b"caf\xe9.txt"]


def test_hundreds_of_planted_results_make_a_verdict_of_some_lines(tmp_path: Path) -> None:
    plant = "import os\nfor i in range(300): os.mkdir(d := f'{i}' + 'n' * 240); open(f'{d}/reward.txt', 'w')"
    run, _ = _ruined(plant, tmp_path)
    assert run.verdict is not None
    assert run.reward == 0.0
    assert run.verdict.tampering[-1].detail == "and 250 more findings"
    assert len(run.verdict.model_dump_json()) < 50_000


def test_what_was_solved_and_then_made_unkeepable_earns_nothing(tmp_path: Path) -> None:
    solved = act("write_file", path="a.py", content="def f(x): return x + 1\n")
    run, _ = _ruined(LOST["sparse files"], tmp_path, first=(solved,))
    assert (run.reward, run.verdict and run.verdict.failure_kind) == (0.0, "workspace_lost")


def test_a_workspace_that_is_mended_counts_again(tmp_path: Path) -> None:
    ruin = act(
        "python",
        code="open('s', 'wb').truncate(250 << 20); open('t', 'wb').truncate(250 << 20)\n"
        + LOST["sparse files"],
    )
    mend = act("shell", command="rm s t s0 s1 s2; echo 'def f(x): return x + 1' > a.py")
    run, _ = _ruined("pass", tmp_path, first=(ruin, mend))
    assert [turn.snapshot is None for turn in run.turns[:2]] == [True, False]
    assert run.reward == 1.0


def test_new_bytes_of_one_run_are_limited_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quota, "__init__", lambda self, left=0: setattr(self, "left", 3 << 20))
    source = "import os\nopen('x', 'wb').write(os.urandom(1 << 20))"
    acts = tuple(act("python", code=source + f"  # {n}") for n in range(4))
    run, _ = _ruined("pass", tmp_path, first=acts)
    texts = [turn.observations[0].text for turn in run.turns]
    assert ["are left of what one run may keep" in text for text in texts[:4]] == [False] * 2 + [False, True]
    assert run.reward == 0.0
    kept = sum(path.stat().st_size for path in (tmp_path / "blobs").rglob("*") if path.is_file())
    assert kept < 4 << 20


def test_a_run_whose_sandbox_failed_has_no_reward(tmp_path: Path) -> None:
    hidden = CaseChecks(entry_point="f", cases=(Case(),))
    gone = _Gone(open_sandbox("ns"))
    runtime = a_runtime(tmp_path, [act("shell", command="ls"), SUBMIT], sandbox=gone)
    run = grade_run(run_task(a_task(artifacts=("a.py",), hidden=hidden), runtime), runtime)
    assert (run.stop, run.reward) == (StopReason.SANDBOX_ERROR, None)


class _Gone:
    """A sandbox whose jails are killed from outside."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.name, self.layers, self.python = inner.name, inner.layers, inner.python

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        jail = self._inner.open(workspace, limits)
        assert isinstance(jail, NsJail)
        jail._process.kill()
        return jail
