"""SWE-bench rows on a local repository: one commit's files, no history, tests only at grading."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from nano_coder.agent.profiles import COMPACT_1
from nano_coder.run.execution import Runtime, grade_run, run_task
from nano_coder.sandbox.protocol import open_sandbox
from nano_formats.swe_bench import SWE_BENCH, read_swe
from nano_rl.gather.rollouts import oracle_policy
from nano_rl.task_formats import ReadOptions
from nano_shared.errors import Refused
from nano_shared.hidden_checks import CommandChecks
from nano_shared.store import LogStore

WRONG, RIGHT = "def inc(n):\n    return n\n", "def inc(n):\n    return n + 1\n"
TEST = "from calc import inc\n\n\ndef test_inc():\n    assert inc(1) == 2\n"


def git(folder: Path, *arguments: str) -> str:
    who = {f"GIT_{role}_{part}": "a@b" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env=os.environ | who,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q")
    for text in (WRONG, RIGHT):
        (folder / "calc.py").write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "step")
    return folder


def row(repo: Path) -> dict[str, object]:
    """The row of the second commit: its change is the reference, its test comes with the row."""
    base = git(repo, "rev-parse", "HEAD~1").strip()
    patch = git(repo, "diff", "HEAD~1", "HEAD")
    (repo / "test_calc.py").write_text(TEST)
    git(repo, "add", "-A")
    test_patch = git(repo, "diff", "--cached")
    return {
        "repo": "some/calc", "instance_id": "calc-1", "base_commit": base, "problem_statement": "inc",
        "patch": patch, "test_patch": test_patch, "FAIL_TO_PASS": '["test_calc.py::test_inc"]',
        "PASS_TO_PASS": [],
    }  # fmt: skip


def test_the_workspace_is_the_base_commit_and_nothing_else(repo: Path) -> None:
    task = read_swe(row(repo), ReadOptions(repo=repo))
    assert task.files == {"calc.py": WRONG}
    assert isinstance(task.hidden, CommandChecks)
    assert task.hidden.files["test_calc.py"] == TEST


@pytest.mark.some(1)
@pytest.mark.parametrize(("solved", "reward"), [(True, 1.0), (False, 0.0)])
def test_hidden_tests_decide(repo: Path, tmp_path: Path, solved: bool, reward: float) -> None:
    task = read_swe(row(repo), ReadOptions(repo=repo))
    assert task.oracle is not None
    done = task if solved else task.model_copy(update={"oracle": task.oracle[-1:]})  # submits at once
    policy = oracle_policy(done, COMPACT_1)
    runtime = Runtime(policy=policy, sandbox=open_sandbox(), store=LogStore.open(tmp_path / "log.db"))
    run = grade_run(run_task(task, runtime), runtime)
    assert run.verdict is not None
    assert run.verdict.reward == reward


BROKEN = {
    "base_commit": "0" * 40,
    "test_patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
    "FAIL_TO_PASS": [],
    "instance_id": "",
}


@pytest.mark.parametrize("field", BROKEN)
def test_what_cannot_be_scrubbed_or_applied_is_refused(repo: Path, field: str) -> None:
    with pytest.raises(Refused) as refused:
        read_swe(row(repo) | {field: BROKEN[field]}, ReadOptions(repo=repo))
    assert refused.value.field == field


def test_no_repository_no_task(repo: Path, tmp_path: Path) -> None:
    for options in (ReadOptions(), ReadOptions(repo=tmp_path)):
        with pytest.raises(Refused, match="repo: "):
            read_swe(row(repo), options)


def test_binaries_go_to_the_blob_store_or_are_refused(repo: Path, tmp_path: Path) -> None:
    (repo / "logo.png").write_bytes(b"\x89PNG\xff")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "logo")
    (repo / "calc.py").write_text(WRONG)
    git(repo, "commit", "-qam", "break")
    given = row(repo)
    with pytest.raises(Refused, match="logo"):
        read_swe(given, ReadOptions(repo=repo))
    blobs = LogStore.open(tmp_path / "log.db").blobs
    assert read_swe(given, ReadOptions(repo=repo, blobs=blobs)).snapshot is not None


def test_the_rows_go_back_as_they_came(repo: Path, tmp_path: Path) -> None:
    given = row(repo)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(given))
    (read,) = SWE_BENCH.read(path, ReadOptions(repo=repo))
    assert SWE_BENCH.to_rows(read) == [given]  # type: ignore[arg-type]
