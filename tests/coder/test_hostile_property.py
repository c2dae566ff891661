"""Drawn hostile workspaces, solutions and reports: nothing is raised, a verdict exists, and it is 0."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from executions import SUBMIT, a_runtime, a_task, act, limits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_verdicts import FORGE, FORGE_STRICT, STRICT, _cases, _suite

from nano_coder.grading.hidden_cases import _reports, judged
from nano_coder.run.execution import grade_run, run_task
from nano_coder.sandbox.protocol import ExecResult, ResourceUse, Sandbox, open_sandbox
from nano_graders.two_jail_suite import _judged, read_reports
from nano_shared.errors import SandboxError
from nano_shared.hidden_checks import Case, CaseChecks
from nano_shared.types import StopReason

NONCE = "0" * 32
ENDED = ExecResult(
    exit_code=0, signal=None, timed_out=False, oom=False, stdout=b"", stderr=b"", stdout_bytes=0,
    stderr_bytes=0, used=ResourceUse(wall_s=0.0),
)  # fmt: skip

FIELDS = (
    "value", "raise", "exit", "not_plain", "forged", "timeout", "too_long", "signal", "done", "ready",
    "collected", "check", "state", "import", "findings", "broken", "patched", "ended", "cpu_s", "changed",
)  # fmt: skip
TEXTS = st.text() | st.sampled_from(["\ud800", "pass"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)
DEEP = st.tuples(st.sampled_from(["[", '{"a":']), st.integers(1, 3000)).map(
    lambda drawn: '{"value":' + drawn[0] * drawn[1] + "1" + ("]" if drawn[0] == "[" else "}") * drawn[1] + "}"
)
OBJECTS = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4).map(json.dumps)
REPORTS = OBJECTS | DEEP | VALUES.map(json.dumps) | st.text() | st.just("1" * 5000)

NAMES = st.binary(min_size=1, max_size=255).map(lambda name: name.replace(b"/", b"-").replace(b"\0", b"0"))
PATHS = st.lists(
    st.sampled_from([b"a.py", b"d", b"..", b".nano", b"__pycache__"]) | NAMES, min_size=1, max_size=4
)
DEEDS = st.sampled_from([
    "os.makedirs(p, exist_ok=True)", "open(p, 'wb').write(os.urandom(n))", "open(p, 'wb').truncate(n * 4000)",
    "os.mkfifo(p)", "socket.socket(socket.AF_UNIX).bind(p)", "os.symlink(q, p)", "os.link('a.py', p)",
    "os.chmod(p, n % 0o10000)", "os.remove(p)", "shutil.rmtree(p)", "os.rename(p, q)", "os.rename('a.py', p)",
    "os.makedirs(b'/'.join([b'x'] * (n % 900)))", "os.utime(p, (n, -n))", "os.mkdir(p, 0)",
    "[os.link('a.py', p + b'%d' % i) for i in range(n % 3000)]",
    "[open(p + b'%d' % i, 'wb') for i in range(n % 3000)]",
])  # fmt: skip
STEPS = st.lists(st.tuples(DEEDS, PATHS, PATHS, st.integers(0, 1 << 17)), min_size=1, max_size=8)

calm = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=300, **calm)  # type: ignore[arg-type]
@given(st.lists(REPORTS, max_size=4))
def test_drawn_reports_are_judged_whatever_they_say(reports: list[str]) -> None:
    lines = [f"{NONCE}{text}" for text in ('{"ready": true}', *reports)]
    stdout = "\n".join(lines).encode("utf-8", "surrogatepass")
    outcome = judged({"case_1": object(), "case_2": object()}, list(_reports(stdout, NONCE))[1:], ENDED)
    assert not outcome.right
    with suppress(SandboxError):
        _judged(read_reports(stdout, NONCE), ENDED, None)  # type: ignore[arg-type]


def _forge(report: str, sandbox: Sandbox) -> None:
    text = json.dumps(report)
    assert _cases(f"{FORGE}    say({text})", sandbox).reward == 0.0
    assert _suite(STRICT, f"{FORGE_STRICT}say({text})", sandbox, "unittest", strict=True).reward == 0.0


@pytest.mark.some(3)
@settings(max_examples=8, **calm)  # type: ignore[arg-type]
@given(REPORTS)
def test_a_drawn_report_of_a_solution_earns_nothing(report: str) -> None:
    _forge(report, open_sandbox("ns"))


def _ruin(steps: list[tuple[str, list[bytes], list[bytes], int]], folder: Path, sandbox: Sandbox) -> None:
    lines = ["import os, shutil, socket"]
    for deed, path, other, number in steps:
        lines.append(f"p, q, n = {b'/'.join(path)!r}, {b'/'.join(other)!r}, {number}")
        lines.append(f"try: {deed}\nexcept (OSError, ValueError): pass")
    hidden = CaseChecks(entry_point="f", cases=(Case(args=[1], expected=2),))
    task = a_task(files={"a.py": "f = 1\n"}, artifacts=("a.py",), limits=limits(), hidden=hidden)
    texts = [act("python", code="\n".join(lines)), act("shell", command="ls -la"), SUBMIT]
    runtime = a_runtime(folder, texts, sandbox=sandbox)
    run = grade_run(run_task(task, runtime), runtime)
    # a workspace that cannot be kept, too deep say, is given up
    assert run.stop in (StopReason.FINISHED, StopReason.GAVE_UP), run.verdict
    assert run.reward == 0.0, run.verdict
    assert runtime.store.get(run.id) == run
    runtime.store.close()


@pytest.mark.some(3)
@settings(max_examples=12, **calm)  # type: ignore[arg-type]
@given(STEPS)
def test_a_drawn_workspace_earns_nothing(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, list[bytes], list[bytes], int]]
) -> None:
    _ruin(steps, tmp_path_factory.mktemp("run"), open_sandbox("ns"))


@pytest.mark.slow
@settings(max_examples=300, **calm)  # type: ignore[arg-type]
@given(STEPS, REPORTS, st.sampled_from(["ns", "bwrap"]))
def test_many_drawn_workspaces_and_reports_earn_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, list[bytes], list[bytes], int]],
    report: str,
    backend: str,
) -> None:
    sandbox = open_sandbox(backend)
    _ruin(steps, tmp_path_factory.mktemp("run"), sandbox)
    _forge(report, sandbox)
