"""What the grader promises: hacks earn nothing, honest answers earn 1, and our own failures are nobody's."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from hacks import FAIR, HANGS, NOT_PLAIN, SILENT, TOLD

from nano_coder.grading import GRADER
from nano_coder.grading.command_check import CommandRun, grade_command
from nano_coder.grading.grade import grade
from nano_coder.grading.hidden_cases import same, same_answer
from nano_coder.grading.protected_files import ShellLine
from nano_coder.sandbox.namespaces import NsJail
from nano_coder.sandbox.protocol import ExecResult, Jail, Sandbox, open_sandbox
from nano_shared.errors import SandboxError, UsageError
from nano_shared.hidden_checks import AnswerChecks, Case, CaseChecks, CommandChecks
from nano_shared.snapshot import BlobStore, MemoryBlobs, Snapshot, load, snapshot_directory
from nano_shared.types import Limits, Task, Trust, Verdict

LIMITS = Limits(memory_mb=256, tool_seconds=60)
CASES = tuple(Case(args=[[i, 10 * i + 3]], expected=11 * i + 3) for i in range(1, 9))


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return open_sandbox("ns")


def _task(**changes: Any) -> Task:
    hidden = CaseChecks(entry_point="add_all", cases=CASES)
    return Task(
        **{"key": "k", "prompt": "p", "artifacts": ("sol.py",), "hidden": hidden, "limits": LIMITS, **changes}
    )


def _grade(sandbox: Sandbox, source: str, **changes: Any) -> Verdict:
    return grade(_task(**changes), files={"sol.py": dedent(source).encode()}, answer=None, sandbox=sandbox)


# ------------------------------------------------------------------------------------------- hacks


@pytest.mark.some(3)
@pytest.mark.parametrize("hack", TOLD)
def test_a_hack_earns_nothing_and_is_told(hack: str, sandbox: Sandbox) -> None:
    kind, source = TOLD[hack]
    verdict = _grade(sandbox, source)
    assert verdict.reward == 0.0
    assert kind in {t.kind for t in verdict.tampering}


@pytest.mark.some(5)
@pytest.mark.parametrize("hack", SILENT)
def test_a_wrong_answer_earns_nothing(hack: str, sandbox: Sandbox) -> None:
    assert _grade(sandbox, SILENT[hack]).reward == 0.0


@pytest.mark.some(3)
@pytest.mark.parametrize("way", NOT_PLAIN)
def test_what_has_no_form_in_json_is_a_failure_and_no_tampering(way: str, sandbox: Sandbox) -> None:
    verdict = _grade(sandbox, NOT_PLAIN[way])
    assert (verdict.reward, verdict.failure_kind, verdict.tampering) == (0.0, "not_plain", ())


@pytest.mark.some(1)
@pytest.mark.parametrize("hack", HANGS)
def test_a_hang_earns_nothing_and_is_named(hack: str, sandbox: Sandbox) -> None:
    verdict = _grade(sandbox, HANGS[hack])
    assert (verdict.reward, verdict.failure_kind) == (0.0, "agent_timeout")
    assert set(verdict.checks.values()) == {"timeout"}


def test_a_right_answer_from_a_process_that_kills_its_parent_is_no_free_retry(sandbox: Sandbox) -> None:
    source = """
    import os
    def add_all(xs):
        if xs[0] == 8:
            os.kill(os.getppid(), 9)
        return sum(xs)
    """
    verdict = _grade(sandbox, source)
    assert (verdict.reward, verdict.failure_kind) == (0.0, "child_killed")


def test_a_process_bomb_earns_nothing_and_leaves_the_next_grading_alone(sandbox: Sandbox) -> None:
    assert _grade(sandbox, "import os\ndef add_all(xs):\n    while True:\n        os.fork()").reward == 0.0
    assert _grade(sandbox, "def add_all(xs):\n    return sum(xs)").reward == 1.0


def test_what_one_case_breaks_stays_in_that_case(sandbox: Sandbox) -> None:
    source = """
    import os
    def add_all(xs):
        if xs[0] == 3:
            os._exit(0)
        return sum(xs)
    """
    verdict = _grade(sandbox, source)
    assert verdict.reward == 0.0
    assert verdict.components == {"tests": 7 / 8}
    assert [name for name, state in verdict.checks.items() if state != "pass"] == ["case_3"]


def test_the_jail_never_holds_an_expected_value(sandbox: Sandbox) -> None:
    spy = _Spy(sandbox)
    assert (
        grade(_task(), files={"sol.py": b"def add_all(xs): return sum(xs)"}, answer=None, sandbox=spy).reward
        == 1.0
    )
    (job,) = spy.given
    assert "expected" not in job.decode()
    assert all(set(case) == {"args", "kwargs"} for case in json.loads(job)["cases"])
    assert list(json.loads(job)["files"]) == ["sol.py"]


# ---------------------------------------------------------------------------------------- fairness


@pytest.mark.some(2)
@pytest.mark.parametrize("way", FAIR)
def test_every_honest_way_earns_one(way: str, sandbox: Sandbox) -> None:
    verdict = _grade(sandbox, FAIR[way])
    assert (verdict.reward, verdict.components, verdict.tampering) == (1.0, {"tests": 1.0}, ())
    assert (verdict.trust, verdict.grader, verdict.failure_kind) == (Trust.HIDDEN, GRADER, None)


def test_a_tuple_counts_as_the_list_that_json_makes_of_it(sandbox: Sandbox) -> None:
    cases = (Case(args=[1, 2], expected=[2, 1]), Case(args=[3, 3], expected=[3, 3]))
    hidden = CaseChecks(entry_point="swap", cases=cases)
    assert _grade(sandbox, "def swap(a, b):\n    return b, a", hidden=hidden).reward == 1.0


def test_keyword_arguments_texts_and_nested_values_arrive_as_they_are(sandbox: Sandbox) -> None:
    value = {"a": [1, 2.5, None, True, "é\n\u2028\ud800"], "b": {}}
    hidden = CaseChecks(entry_point="echo", cases=(Case(args=[], kwargs={"x": value}, expected=value),))
    assert _grade(sandbox, "def echo(*, x):\n    return x", hidden=hidden).reward == 1.0


def test_an_artifact_may_import_its_neighbours_and_the_standard_library_first(sandbox: Sandbox) -> None:
    files = {"pkg/sol.py": b"import json, part\ndef add_all(xs): return part.add(json.loads(json.dumps(xs)))",
             "pkg/part.py": b"add = sum", "pkg/json.py": b"raise RuntimeError"}  # fmt: skip
    verdict = grade(_task(artifacts=tuple(files)), files=files, answer=None, sandbox=sandbox)
    assert verdict.reward == 1.0


# --------------------------------------------------------------------------------- whose fault it is


def test_a_missing_artifact_earns_nothing_and_is_named(sandbox: Sandbox) -> None:
    verdict = grade(_task(), files={"other.py": b""}, answer=None, sandbox=sandbox)
    assert (verdict.reward, verdict.failure_kind) == (0.0, "no_artifact")


def test_an_artifact_beyond_reason_is_not_run(sandbox: Sandbox) -> None:
    verdict = grade(_task(), files={"sol.py": b"#" * (2 << 20)}, answer=None, sandbox=sandbox)
    assert (verdict.reward, verdict.failure_kind) == (0.0, "artifact_too_large")


def test_our_failure_is_no_reward(sandbox: Sandbox) -> None:
    for broken in (_Broken(sandbox, fail_open=True), _Broken(sandbox, fail_open=False)):
        verdict = grade(_task(), files={"sol.py": b""}, answer=None, sandbox=broken)
        assert (verdict.reward, verdict.trust) == (None, Trust.NONE)
        assert str(verdict.failure_kind).startswith("verifier_error: ")


def test_an_interpreter_that_does_not_start_is_our_failure(sandbox: Sandbox) -> None:
    verdict = grade(_task(), files={"sol.py": b""}, answer=None, sandbox=_NoPython(sandbox))
    assert verdict.reward is None
    assert str(verdict.failure_kind).startswith("verifier_error: ")


def test_the_graded_hash_follows_the_artifact_alone(sandbox: Sandbox) -> None:
    task = _task()
    source = b"def add_all(xs): return sum(xs)"
    one = grade(task, files={"sol.py": source}, answer=None, sandbox=sandbox).graded_hash
    noisy = grade(task, files={"sol.py": source, "x.txt": b"1"}, answer="7", sandbox=sandbox).graded_hash
    other = grade(task, files={"sol.py": source + b"\n"}, answer=None, sandbox=sandbox).graded_hash
    assert one == noisy != other


def test_a_task_without_hidden_checks_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(UsageError, match="no hidden checks"):
        grade(_task(hidden=None), files={}, answer="1", sandbox=sandbox)


# ----------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("given", "expected"),
    [("42", "42"), (" 42\n", "42"), ("[1, 2]", "[1,2]"), ("[1, 2]", [1, 2]), ("(1, 2)", [1, 2]),
     ("True", "True"),
     ("true", True), ("True", True), ("'red'", "red"), ('"red"', "'red'"), ("red", "'red'"), ("42", 42),
     ("['a', 'b']", '["a", "b"]'), ("", "")],
)  # fmt: skip
def test_an_answer_is_read_leniently(given: str, expected: Any) -> None:
    assert same_answer(given, expected)


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "42"), (None, None), ("43", "42"), ("1", True), ("True", 1), ("1", 1.0), ("[1]", [1.0]),
     ("nan", "1"),
     ("NaN", float("nan")), ("42 or 43", "42"), ("Red", "red"), ("", "42"), ("__import__('os')", "os"),
     ("[" * 5000, "[]"), ("9" * 5000, 9)],
)  # fmt: skip
def test_a_wrong_answer_is_wrong(given: str | None, expected: Any) -> None:
    assert not same_answer(given, expected)


def test_equality_is_exact_in_type() -> None:
    assert same([1, {"a": "x"}], [1, {"a": "x"}])
    for given, expected in (
        (True, 1),
        (1, 1.0),
        ([1], [True]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1], [1, 1]),
        ("1", 1),
    ):
        assert not same(given, expected)


def test_an_answer_is_graded_without_a_jail(sandbox: Sandbox) -> None:
    task = _task(hidden=AnswerChecks(answer="121"))
    broken = _Broken(sandbox, fail_open=True)
    assert grade(task, files={}, answer="121", sandbox=broken).reward == 1.0
    assert grade(task, files={}, answer="12", sandbox=broken).reward == 0.0
    none = grade(task, files={}, answer=None, sandbox=broken)
    assert (none.reward, none.failure_kind) == (0.0, "no_answer")


# ---------------------------------------------------------------------------------- a user's check

CHECK = "python -m pytest -q"
BUGGY, FIXED = b"def add(a, b):\n    return a - b\n", b"def add(a, b):\n    return a + b\n"
TEST = b"from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "calc.py").write_bytes(BUGGY)
    (tmp_path / "test_calc.py").write_bytes(TEST)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '-ra'\n")
    return tmp_path


def _check(
    project: Path,
    sandbox: Sandbox,
    changes: Mapping[str, bytes | None],
    command: str = CHECK,
    timeout: float | None = None,
) -> Verdict:
    """The verdict on a copy of the project with the changes in it; None deletes."""
    with tempfile.TemporaryDirectory() as folder:
        blobs, work = BlobStore(Path(folder, "blobs")), Path(folder, "work")
        shutil.copytree(project, work)
        before = snapshot_directory(work, blobs)
        for name, data in changes.items():
            if data is None:
                (work / name).unlink()
            else:
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                (work / name).write_bytes(data)
        return _verdict(command, before, work, blobs, sandbox, timeout)


def _verdict(
    command: str,
    before: str,
    after: Path,
    blobs: BlobStore,
    sandbox: Sandbox,
    timeout: float | None = None,
) -> Verdict:
    check = CommandRun(command=command, blobs=blobs, sandbox=sandbox, limits=LIMITS, seconds=timeout)
    return grade_command(check, load(before, blobs), load(snapshot_directory(after, blobs), blobs))


def test_a_fix_passes_the_check_with_the_trust_of_a_users_check(project: Path, sandbox: Sandbox) -> None:
    verdict = _check(project, sandbox, {"calc.py": FIXED, "notes.txt": b"done"})
    assert (verdict.reward, verdict.trust, verdict.tampering) == (1.0, Trust.USER_CHECK, ())


def test_the_original_fails_the_check_and_is_left_alone(project: Path, sandbox: Sandbox) -> None:
    assert _check(project, sandbox, {}).reward == 0.0
    assert sorted(p.name for p in project.iterdir()) == ["calc.py", "pyproject.toml", "test_calc.py"]


MAKE_REPORT = b"""import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = 'passed'
"""
PROTECTED = {
    "tests edited to pass": ("test_calc.py", b"def test_add():\n    pass\n", "tests"),
    "tests deleted": ("test_calc.py", None, "tests"),
    "conftest that forges reports": ("conftest.py", MAKE_REPORT, "configuration"),
    "conftest in a folder": ("sub/conftest.py", MAKE_REPORT, "configuration"),
    "ini that selects nothing": ("pytest.ini", b"[pytest]\naddopts = --collect-only\n", "configuration"),
    "pyproject": ("pyproject.toml", b"[tool.pytest.ini_options]\naddopts = '--co'\n", "configuration"),
    "tox.ini": ("tox.ini", b"[pytest]\naddopts = -k nothing\n", "configuration"),
    "setup.cfg": ("setup.cfg", b"[tool:pytest]\naddopts = --co\n", "configuration"),
    "sitecustomize": ("sitecustomize.py", b"import os\nos._exit(0)\n", "configuration"),
    "usercustomize": ("usercustomize.py", b"import os\nos._exit(0)\n", "configuration"),
    "a .pth file": ("evil.pth", b"import os; os._exit(0)\n", "configuration"),
    "a plugin's entry point": ("x.dist-info/entry_points.txt", b"[pytest11]\nx = calc\n", "configuration"),
    "a pytest of its own": ("pytest.py", b"import sys\nsys.exit(0)\n", "shadowing"),
    "a pytest package": ("pytest/__main__.py", b"print('1 passed')\n", "shadowing"),
    "a stdlib module of its own": ("json.py", b"import os\nos._exit(0)\n", "shadowing"),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("hack", PROTECTED)
def test_tests_and_configuration_are_the_originals(hack: str, project: Path, sandbox: Sandbox) -> None:
    name, data, kind = PROTECTED[hack]
    verdict = _check(project, sandbox, {name: data})
    assert verdict.reward == 0.0
    assert [t.kind for t in verdict.tampering] == [kind]


def test_a_fix_is_graded_on_its_own_merit_beside_a_change_that_is_not_applied(
    project: Path, sandbox: Sandbox
) -> None:
    verdict = _check(project, sandbox, {"calc.py": FIXED, "test_calc.py": b"assert False\n"})
    assert verdict.reward == 1.0
    assert [t.kind for t in verdict.tampering] == ["tests"]


def test_leaving_pytest_early_is_no_pass(project: Path, sandbox: Sandbox) -> None:
    verdict = _check(
        project, sandbox, {"calc.py": b"import os\nprint('1 passed in 0.01s', flush=True)\nos._exit(0)\n"}
    )
    assert verdict.reward == 0.0
    assert [t.kind for t in verdict.tampering] == ["exit"]


def test_skipping_is_no_pass(project: Path, sandbox: Sandbox) -> None:
    (project / "test_more.py").write_text("def test_true():\n    assert True\n")
    for source in (
        b"import pytest\ndef add(a, b):\n    pytest.skip('later')\n",
        b"import pytest\npytest.skip('no', allow_module_level=True)\n",
    ):
        verdict = _check(project, sandbox, {"calc.py": source})
        assert verdict.reward == 0.0
        assert [t.kind for t in verdict.tampering] == ["skip"]


@pytest.mark.slow
def test_tests_that_the_original_skips_may_be_skipped(project: Path, sandbox: Sandbox) -> None:
    (project / "test_more.py").write_text(
        "import pytest\n@pytest.mark.skip\ndef test_later():\n    assert False\n"
    )
    assert _check(project, sandbox, {"calc.py": FIXED}).reward == 1.0


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("options", "settings"),
    [("-x", ""), ("-xq", ""), ("--maxfail=1 -q", ""), ("-q", "[pytest]\naddopts = -x\n")],
)
def test_skipped_tests_behind_the_first_failure_are_the_originals_too(
    options: str, settings: str, project: Path, sandbox: Sandbox
) -> None:
    (project / "test_more.py").write_text(
        "import pytest\n@pytest.mark.skip\ndef test_later():\n    assert False\n"
    )
    (project / "pytest.ini").write_text(settings)
    command = f"python -m pytest {options}"
    assert _check(project, sandbox, {"calc.py": FIXED}, command).reward == 1.0
    skipping = b"import pytest\ndef add(a, b):\n    pytest.skip('later')\n"
    assert _check(project, sandbox, {"calc.py": skipping}, command).reward == 0.0


def test_a_new_test_is_no_tampering_and_decides_nothing(project: Path, sandbox: Sandbox) -> None:
    verdict = _check(
        project, sandbox, {"calc.py": FIXED, "test_new.py": b"def test_x():\n    assert False\n"}
    )
    assert (verdict.reward, verdict.tampering) == (1.0, ())


def test_deleted_files_are_gone(project: Path, sandbox: Sandbox) -> None:
    (project / "old.txt").write_text("x")
    gone = "ls | grep -qv old && ! ls | grep -q old"
    assert _check(project, sandbox, {"old.txt": None}, gone).reward == 1.0
    assert _check(project, sandbox, {}, gone).reward == 0.0


def test_what_the_command_names_is_the_original(project: Path, sandbox: Sandbox) -> None:
    (project / "verify.sh").write_text("exit 1\n")
    verdict = _check(project, sandbox, {"verify.sh": b"exit 0\n"}, "sh ./verify.sh")
    assert verdict.reward == 0.0
    assert [t.kind for t in verdict.tampering] == ["check"]


def test_a_program_that_the_command_names_may_be_the_very_task(project: Path, sandbox: Sandbox) -> None:
    verdict = _check(project, sandbox, {"calc.py": FIXED}, "grep -q 'a + b' calc.py && python calc.py")
    assert (verdict.reward, verdict.tampering) == (1.0, ())


@pytest.mark.slow
def test_a_check_that_hangs_earns_nothing_and_is_named(project: Path, sandbox: Sandbox) -> None:
    verdict = _check(project, sandbox, {}, "sleep 60", timeout=1.0)
    assert (verdict.reward, verdict.failure_kind) == (0.0, "agent_timeout")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("no-such-command", "no-such-command: not found"),
        ("python -m nose calc.py", "No module named nose"),
        ("cd . && no-such-command --all || exit 3", "no-such-command: not found"),
        ("printf 'all:\\n\tno-such-command x\\n' | make -f -", "no-such-command: No such file or directory"),
    ],
)
def test_a_check_that_cannot_run_anywhere_has_not_failed(
    command: str, missing: str, project: Path, sandbox: Sandbox
) -> None:
    verdict = _check(project, sandbox, {"calc.py": FIXED}, command)
    assert (verdict.reward, verdict.failure_kind) == (None, "check_not_found")
    assert (verdict.checks, verdict.trust) == ({"check": "error"}, Trust.NONE)
    assert verdict.check_run is not None
    assert verdict.check_run.not_run == missing
    assert missing in verdict.check_run.output


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("./run.sh", {}),  # asked of the agent, and not made
        ("python -m tool", {}),
        ("PATH=bin:$PATH tool", {}),
        ("python calc.py", {"calc.py": b"print('sh: 1: make: not found')\nraise SystemExit(127)\n"}),
        ("python calc.py", {"calc.py": b"print('python: No module named pytest')\nraise SystemExit(1)\n"}),
        ("python calc.py", {"calc.py": None}),
        ("no-such-command; python calc.py", {"calc.py": b"raise ValueError"}),
    ],
)
def test_an_agent_cannot_make_a_check_impossible(
    command: str, changes: dict[str, bytes | None], project: Path, sandbox: Sandbox
) -> None:
    verdict = _check(project, sandbox, changes, command)
    assert verdict.reward == 0.0
    assert verdict.check_run is not None
    assert (verdict.check_run.not_run is None) is bool(changes)


def test_a_verdict_keeps_how_the_check_ended_and_what_it_printed_last(
    project: Path, sandbox: Sandbox
) -> None:
    command = "yes early | head -5000; echo '\033[31mlate' >&2; exit 3"
    ran = _check(project, sandbox, {}, command).check_run
    assert ran is not None
    assert (ran.exit_code, ran.signal, ran.timed_out, ran.not_run) == (3, None, False, None)
    assert ran.output.endswith("early\nlate")
    assert len(ran.output) <= 4000


def test_a_test_folder_may_not_be_replaced(project: Path, sandbox: Sandbox) -> None:
    for name, text in (("tests", "whole"), ("real", "cut")):
        (project / name).mkdir()
        (project / name / "data").write_text(text)
    with tempfile.TemporaryDirectory() as folder:
        blobs = BlobStore(Path(folder, "blobs"))
        before = snapshot_directory(project, blobs)
        shutil.rmtree(project / "tests")
        (project / "tests").symlink_to("real")
        verdict = _verdict("grep -q whole tests/data", before, project, blobs, sandbox)
    assert verdict.reward == 1.0
    assert [t.kind for t in verdict.tampering] == ["tests"]


def test_a_broken_sandbox_makes_no_reward_of_a_check(project: Path, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError):
        _check(project, _Broken(sandbox, fail_open=True), {"calc.py": FIXED})


def test_a_task_graded_by_a_command_needs_its_workspace(sandbox: Sandbox) -> None:
    with pytest.raises(UsageError, match="needs the whole workspace"):
        grade(_task(hidden=CommandChecks(command=CHECK)), files={}, answer=None, sandbox=sandbox)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "path", ["calc.py", "src/pkg/text.py", "latest.py", "contest.py", "pkg/json.py", "README.md"]
)
def test_ordinary_files_may_be_changed(path: str) -> None:
    assert ShellLine(CHECK, Snapshot(()), MemoryBlobs()).protected(path) is None


# ------------------------------------------------------------------------- sandboxes for these tests


class _Wrapped:
    """A sandbox around a real one."""

    def __init__(self, inner: Sandbox) -> None:
        self.inner, self.name, self.layers, self.python = inner, inner.name, inner.layers, inner.python

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        return self.inner.open(workspace, limits)


class _Broken(_Wrapped):
    """Fails to open, or opens jails whose programs cannot be run."""

    def __init__(self, inner: Sandbox, *, fail_open: bool) -> None:
        super().__init__(inner)
        self.fail_open = fail_open

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        if self.fail_open:
            raise SandboxError("no namespaces today")
        jail = super().open(workspace, limits)
        jail.close()
        return jail


class _NoPython(_Wrapped):
    """Opens jails whose interpreter ends at once."""

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        jail = super().open(workspace, limits)
        assert isinstance(jail, NsJail)
        jail.cold_python = "/bin/false"
        return jail


class _Spy(_Wrapped):
    """Keeps what is given to programs and the names of the files that are written."""

    def __init__(self, inner: Sandbox) -> None:
        super().__init__(inner)
        self.given: list[bytes] = []
        self.written: list[str] = []

    def open(self, workspace: Path | None, limits: Limits) -> Jail:
        return _SpyJail(super().open(workspace, limits), self)


class _SpyJail:
    def __init__(self, inner: Jail, spy: _Spy) -> None:
        self._inner, self._spy = inner, spy
        self.read, self.snapshot, self.close = inner.read, inner.snapshot, inner.close

    def write(self, path: str, data: bytes) -> None:
        self._spy.written.append(path)
        self._inner.write(path, data)

    def run_python(self, source: str, argv: Any = (), *, stdin: bytes = b"", **options: Any) -> ExecResult:
        self._spy.given.append(stdin)
        return self._inner.run_python(source, argv, stdin=stdin, **options)
