"""Bug-fix commits of a git history become tasks, admitted by running, and solved by the commit's change."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from git_repository import commit, git

from nano_coder.sandbox.protocol import open_sandbox
from nano_mining.commits import Bounds, CommitTask, commit_tasks
from nano_rl.gather.rollouts import PluginsOff
from nano_shared.errors import UsageError
from nano_shared.snapshot import BlobStore

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
SUMS = '''"""Sums."""


def total(values):
    result = 0
    for value in values[1:]:
        result += value
    return result


class Mean:
    def of(self, values):
        return total(values) / (len(values) + 1)
'''
TEST = "from shop.sums import total\n\n\ndef test_nothing():\n    assert total([]) == 0\n"


@pytest.fixture
def history(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A repository with two fixes among other commits, and the hashes of its commits by subject."""
    folder = tmp_path / "shop"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    mended = SUMS.replace("values[1:]", "values")
    averaged = mended.replace("(len(values) + 1)", "len(values)")
    t1 = TEST + "\n\ndef test_total():\n    assert total([1, 2]) == 3\n"
    t2 = t1 + "\n\ndef test_mean():\n    from shop.sums import Mean\n\n    assert Mean().of([1, 3]) == 2\n"
    t3 = t2 + "\n\ndef test_largest():\n    from shop import sums\n\n    assert sums.largest([1, 3]) == 3\n"
    flaky = "import os\n\n\ndef test_flaky():\n    assert os.urandom(1)[0] < 26\n"
    larger = averaged + "\n\ndef largest(values):\n    return max(values)\n"
    renamed = larger.replace("result", "found")
    steps = {
        "root": {"shop/__init__.py": "", "shop/sums.py": SUMS, "tests/test_sums.py": TEST},
        "first fix": {"shop/sums.py": mended, "tests/test_sums.py": t1, "CHANGELOG.md": "- mended\n"},
        "second fix": {"shop/sums.py": averaged, "tests/test_sums.py": t2},
        "feature": {"shop/sums.py": larger, "tests/test_sums.py": t3},
        "flaky": {"shop/other.py": "x = 1\n", "tests/test_other.py": flaky},
        "refactor": {"shop/sums.py": renamed, "tests/test_sums.py": t3.replace("[1, 3]", "[1, 3, 2]", 1)},
        "docs": {"README.md": "Sums.\n"},
    }
    return folder, {subject: commit(folder, subject, files) for subject, files in steps.items()}


def made(folder: Path, tmp_path: Path, **options: object) -> tuple[list[CommitTask], Counter[str]]:
    refused = Counter[str]()
    blobs = BlobStore(tmp_path / "blobs")
    return list(commit_tasks(folder, blobs, PluginsOff(open_sandbox()), refused=refused, **options)), refused  # type: ignore[arg-type]


@pytest.mark.slow
def test_exactly_the_fixes_of_a_history_become_tasks(
    history: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, commits = history
    (folder / "shop/sums.py").write_text("not committed, and no Python")
    (second, first), refused = made(folder, tmp_path)
    assert [second.commit, first.commit] == [commits["second fix"], commits["first fix"]]
    assert "shop/sums.py::Mean.of" in second.task.provenance.source
    assert "shop/sums.py::total" in first.task.provenance.source
    assert first.task.check == "python -m pytest -q tests/test_sums.py::test_total"
    assert "fix" not in first.task.prompt.replace("fix it", "")
    assert "test_total" in first.task.files["tests/test_sums.py"]
    assert "CHANGELOG.md" not in first.task.files
    assert sum(refused.values()) == len(commits) - 2
    assert refused["ask for what the old source lacks: a feature"] == 1


CHECK = "for each in tests/*.py; do PYTHONPATH=. python $each || exit 1; done"


def small(folder: Path) -> Path:
    """A repository whose second commit mends `total` and renames its test, which ran without pytest."""
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    test = "from sums import total\n\nassert total([1, 2]) == {}\n"
    commit(folder, "root", {"sums.py": SUMS, "tests/check.py": test.format(2)})
    git(folder, "mv", "tests/check.py", "tests/check_sums.py")
    commit(
        folder,
        "mend",
        {"sums.py": SUMS.replace("values[1:]", "values"), "tests/check_sums.py": test.format(3)},
    )
    return folder


def test_a_check_of_any_kind_shows_a_fix_and_a_test_may_be_renamed(tmp_path: Path) -> None:
    (found,), refused = made(small(tmp_path / "shop"), tmp_path, check=CHECK)
    assert (found.task.check, refused) == (CHECK, {"have no parent": 1})
    assert "sums.py::total" in found.task.provenance.source
    assert set(found.task.files) == {"sums.py", "tests/check_sums.py"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "empty", "inside", "shallow", "hostile", "no time"])
def test_a_history_that_cannot_be_used_costs_a_sentence(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "shop"
    if kind in ("none", "empty"):
        folder.mkdir()
        if kind == "empty":
            git(folder, "init", "-q")
        with pytest.raises(UsageError, match="no git history" if kind == "none" else "before the first one"):
            made(folder, tmp_path)
        return
    small(folder)
    match kind:
        case "inside":
            with pytest.raises(UsageError, match="is a part of the repository at"):
                made(folder / "tests", tmp_path)
        case "shallow":
            git(tmp_path, "clone", "-q", "--depth", "1", f"file://{folder}", "clone")
            assert made(tmp_path / "clone", tmp_path)[1] == {
                "are where a shallow clone ends (git fetch --unshallow)": 1
            }
        case "hostile":
            ran = tmp_path / "ran"
            for key in (
                "core.fsmonitor",
                "core.pager",
                "diff.external",
                "filter.f.smudge",
                "core.sshCommand",
            ):
                git(folder, "config", key, f"touch {ran}")
            (folder / ".git/info/attributes").write_text("* filter=f diff=f\n")
            made(folder, tmp_path, check=CHECK)
            assert not ran.exists()
        case "no time":
            assert made(folder, tmp_path, bounds=Bounds(seconds=0))[1] == {"were not reached in time": 2}
