"""Tasks mined from packages: what is read, how a text is broken and repaired, and a killed mining."""

from __future__ import annotations

import ast
import io
import json
import tarfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nano_coder.grading.grade import grade_trajectory
from nano_coder.run.execution import run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.text_files import replace_line
from nano_mining import mining
from nano_mining.candidates import KINDS
from nano_mining.command import command
from nano_mining.packages import read_package
from nano_mining.targets import outline, targets_of, without_body, without_definition, without_tests
from nano_mining.task_check import check_task, log_folder, scratch_runtime
from nano_mining.traces import trace_file, traced_tests
from nano_mining.trials import TrialJob, Version, try_versions
from nano_rl.gather.rollouts import oracle_policy
from nano_rl.tasks.task_file import read_tasks
from nano_shared.errors import SandboxError, UsageError
from nano_shared.types import Limits, Trust

ROOT = Path(__file__).parents[3]
MODULE = '''"""Sums."""


def clamp(x, low, high):
    """The number nearest to x between low and high."""
    # this comment tells how
    if x < low:
        return low
    return high if x > high else x


def bound(y, least, most):
    if y < least:
        return least
    return most if y > most else y


def never(x):
    """No test calls it."""
    return x + 1
'''
TESTS = """import pytest

from demo.sums import bound, clamp


@pytest.mark.parametrize("x, result", [(5, 3), (0, 1), (2, 2)])
def test_clamp(x, result):
    assert clamp(x, 1, 3) == result


class TestBound:
    def test_bound(self):
        assert bound(5, 1, 3) == 3

    def test_nothing(self):
        assert True
"""
PROJECT = '[project]\nname = "demo"\nversion = "0.1"\nlicense = "MIT"\n'
FILES = {
    "src/demo/__init__.py": '"""Demo."""\n', "src/demo/sums.py": MODULE, "tests/test_sums.py": TESTS,
    "pyproject.toml": PROJECT, "tests/conftest.py": "", "setup.py": "raise SystemExit('on the host')\n",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "project"


def _archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"demo-0.1/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_a_folder_and_its_archive_are_one_package(project: Path, tmp_path: Path) -> None:
    folder, archive = read_package(project), read_package(_archive(tmp_path / "demo-0.1.tar.gz", FILES))
    assert folder.id == archive.id
    assert str(folder.origin) == "demo 0.1"
    assert folder.origin.licence == "MIT"
    assert folder.roots == ("src",)
    assert folder.editable == ("src/demo",)
    assert set(folder.modules) == {"src/demo/__init__.py", "src/demo/sums.py"}
    assert set(folder.tests) == {"tests/test_sums.py"}
    assert set(folder.support("tests/test_sums.py")) == {"tests/conftest.py"}


def test_the_licence_is_read_from_metadata(tmp_path: Path) -> None:
    said = (
        "Metadata-Version: 2.1\nName: Demo\nVersion: 2\nClassifier: License :: OSI Approved :: BSD License\n"
    )
    origin = read_package(_archive(tmp_path / "demo.tar.gz", FILES | {"PKG-INFO": said})).origin
    assert (origin.name, origin.version, origin.licence) == ("Demo", "2", "BSD License")


def test_what_is_no_package_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "tests/test_sums.py").unlink()
    (tmp_path / "broken.tar.gz").write_bytes(b"no archive")
    outside = _archive(tmp_path / "outside.tar.gz", {"../../escaped.py": "x = 1\n"})
    for source, says in (
        (project, "no tests found"), (tmp_path / "broken.tar.gz", "cannot be read"),
        (outside, "cannot be read"), (tmp_path / "demo.whl", "neither a folder"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            read_package(source)


@pytest.mark.slow
def test_sources_that_cannot_be_mined_are_named_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untested = _archive(tmp_path / "untested-1.tar.gz", {"demo.py": MODULE})
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="none of the 2 sources can be mined"):
        command([untested, tmp_path / "empty"], tmp_path / "out.jsonl")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"skipped: {untested}: no tests found")
    assert second.startswith(f"skipped: {tmp_path / 'empty'}: no modules found")


def test_a_module_indented_by_tabs_has_the_targets_of_one_indented_by_blanks() -> None:
    blanks = "class A:\n    def f(self, x):\n        if x:\n            return 1\n        return 2\n"
    tabs = blanks.replace("    ", "\t")
    assert [t.hash for t in targets_of("a.py", tabs)] == [t.hash for t in targets_of("a.py", blanks)]


@pytest.mark.slow
def test_every_breakage_is_undone_by_its_edit() -> None:
    count = 0
    for path in sorted((ROOT / "plugins/mining/nano_mining").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for target in targets_of(path.name, text):
            for change in (without_body, without_definition):
                if (broken := change(text, target)) is not None:
                    back = replace_line(path.name, broken.source, broken.line, broken.new)
                    assert ast.dump(ast.parse(back)) == ast.dump(ast.parse(text)), (path, target.name)
                    assert broken.source != text
                    count += 1
    assert count > 40


def test_an_outline_of_a_class_shows_no_body() -> None:
    text = """class Stack:
    \"\"\"Last in, first out.\"\"\"

    limit = 9

    @property
    def top(self):
        \"\"\"The last.\"\"\"
        return self.items[-1]
"""
    shown = outline(text, targets_of("stack.py", text)[0])
    assert shown.rstrip() == text.replace("return self.items[-1]", "...").rstrip()


def test_a_removed_body_leaves_no_hint() -> None:
    (clamp, bound, _) = targets_of("sums.py", MODULE)
    assert clamp.hash == bound.hash, "the same program under other names"
    broken = without_body(MODULE, clamp)
    assert broken is not None
    assert "tells how" not in broken.source
    assert "nearest" in broken.source


def test_tests_are_taken_out_by_name() -> None:
    left = without_tests(TESTS, lambda name: name != "test_nothing")
    assert "test_nothing" in left
    assert "test_clamp" not in left
    assert "parametrize" not in left
    none = without_tests(TESTS, lambda name: True)
    assert "TestBound" not in none
    based = without_tests(TESTS + "\n\nclass TestMore(TestBound):\n    pass\n", lambda name: True)
    assert "class TestBound:\n    pass" in based
    assert ast.parse(based)


def test_a_trace_names_the_functions_that_a_test_calls(project: Path) -> None:
    package = read_package(project)
    tests = traced_tests(trace_file(package, "tests/test_sums.py", open_sandbox()))
    calls = {test.name: {line for path, line in test.calls if path == "src/demo/sums.py"} for test in tests}
    assert calls == {"test_clamp": {4}, "test_bound": {12}, "test_nothing": set()}


@pytest.mark.slow
def test_versions_of_a_module_are_tried_in_one_jail(project: Path) -> None:
    package = read_package(project)
    path = "src/demo/sums.py"

    def version(old: str, new: str, group: str = "code") -> Version:
        return Version(group=group, path=path, text=MODULE.replace(old, new))

    versions = [
        version("if x < low", "if x > low", "bug"),
        version("x + 1", "x + 2"),  # no test calls it
        version("if x < low", "if x >= low", "bug"),
        version("def clamp", "def clamped"),
        version("return low", "import os; os._exit(0)"),
    ]
    job = TrialJob(words=("-x", "tests/test_sums.py"), files={}, versions=versions, most={"bug": 1})
    wrong = replace(job, files={"tests/test_sums.py": TESTS.replace("== result", "== 9")})
    refused, trials = try_versions(package, [wrong, job], open_sandbox())
    assert refused is None, "the right code does not pass"
    assert trials is not None
    assert [trial and (trial.refusal, trial.failed) for trial in trials] == [
        (None, "tests/test_sums.py::test_clamp[5-3]"), ("the tests pass on it", ""), None, (None, ""),
        ("the tests do not fail plainly on it", ""),
    ]  # fmt: skip
    assert try_versions(package, [job], open_sandbox()) == [trials], "nothing is left behind"
    skip = "\n\nimport pytest\n\n\n@pytest.mark.skip\ndef test_later():\n    pass\n"
    skipping = replace(job, files={"tests/test_sums.py": TESTS + skip}, versions=[versions[0], versions[3]])
    (trials,) = try_versions(package, [skipping], open_sandbox())
    assert trials is not None
    assert [trial and trial.refusal for trial in trials] == [
        None, "no test runs on it, and tests are skipped on the right code"
    ]  # fmt: skip


def test_what_a_docstring_leaves_open_is_not_asked_for() -> None:
    text = """class Stack:
    \"\"\"Last in, first out, as long as you like.\"\"\"

    def push(self, item):
        return self.items.append(item)


def short(x):
    \"\"\"The result.\"\"\"
    return x


def long(x):
    \"\"\"The number after x, which must be whole.\"\"\"
    return x + 1
"""
    assert [t.name for t in targets_of("stack.py", text) if t.documented] == ["long"]


def test_a_trace_of_another_shape_is_left_out() -> None:
    right = {"test": "t.py::test_a", "passed": True, "seconds": 0.1, "calls": [["a.py", 1]], "options": ""}
    assert len(traced_tests([right])) == 1
    for wrong in ({"passed": False}, {"seconds": 9.0}, {"seconds": "1"}, {"calls": []}, {"calls": None}):
        assert not traced_tests([right | wrong])


@pytest.mark.slow
def test_a_killed_mining_ends_with_the_same_tasks(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    out, report = tmp_path / "tasks.jsonl", tmp_path / "report.json"
    journal = tmp_path / "tasks.jsonl.journal"
    assert command([project], out, bugs=1, workers=2, report=report) == 0
    tasks, whole = read_tasks(out), out.read_bytes()
    assert sorted(str(task.view) for task in tasks) == [f"mined_{kind}" for kind in sorted(KINDS)]
    (found,) = json.loads(report.read_text())
    assert (found["functions"], found["called"], found["repeated"]) == (3, 2, 1)
    assert {task.provenance.source for task in tasks} == {"demo 0.1: src/demo/sums.py:4 clamp"}
    assert {task.provenance.licence for task in tasks} == {"MIT"}

    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote the last line
    out.unlink()
    assert command([project], out, bugs=1, workers=2) == 0
    assert out.read_bytes() == whole

    with log_folder() as folder:
        runtime = scratch_runtime(folder, tmp_path / "home" / "blobs")
        with runtime.store:
            assert [check_task(task, runtime).reasons for task in tasks] == [()] * 3
            run = run_task(tasks[0], replace(runtime, policy=oracle_policy(tasks[0], runtime.profile)))
            verdict = grade_trajectory(run, open_sandbox(), runtime.store.blobs)
    assert verdict is not None
    assert (verdict.reward, verdict.trust) == (1.0, Trust.HIDDEN)


@pytest.mark.slow
def test_an_interrupted_mining_writes_what_it_has(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(mining, "_TOGETHER", 1)
    (project / "src/demo/more.py").write_text("def twice(x):\n    return x * 2\n")
    test = "from demo.more import twice\n\n\ndef test_twice():\n    assert twice(4) == 8\n"
    (project / "tests/test_more.py").write_text(test)
    whole, tried = mining.Miner._candidates, []

    def candidates(self: mining.Miner, some: Any) -> Any:
        tried.append(some)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return whole(self, some)

    monkeypatch.setattr(mining.Miner, "_candidates", candidates)
    out, report = tmp_path / "tasks.jsonl", tmp_path / "report.json"
    assert command([project], out, kind=["bug"], bugs=1, workers=1, report=report) == 130
    (task,) = read_tasks(out)
    assert "tests/test_more.py::test_twice` fails" in task.prompt
    assert "the same command goes on" in capsys.readouterr().err
    (found,) = json.loads(report.read_text())
    assert (found["called"], found["repeated"], found["tried"]) == (3, 1, 1)
    assert command([project], out, kind=["bug"], bugs=1, workers=1) == 0
    assert len(read_tasks(out)) == 2


def test_an_interrupted_mining_does_not_wait_for_what_runs() -> None:
    sandbox, started = mining.StoppableSandbox(open_sandbox()), threading.Event()

    def work(job: int) -> dict[str, Any]:
        with closing(sandbox.open(None, Limits())) as jail:
            while job == 2:  # its first program is ended, and there is no second
                started.set()
                jail.run(["sleep", "500"], timeout=600)
        return {}

    jobs = mining.in_threads([1, 2], work, 2, sandbox.stop)
    assert next(jobs) == (1, {})
    started.wait()
    jobs.close()
    with pytest.raises(SandboxError, match="interrupted"):
        sandbox.open(None, Limits())


def test_a_journal_of_another_kind_is_refused(project: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl.journal").write_text('{"no": "id"}\n')
    with pytest.raises(UsageError, match="delete it to start anew"):
        command([project], tmp_path / "tasks.jsonl")
    with pytest.raises(UsageError, match="unknown kind 'bugs'"):
        command([project], tmp_path / "tasks.jsonl", kind=["bugs,body"])
