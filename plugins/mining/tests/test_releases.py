"""Real fixes between releases: what pip lists, and the smallest part of a change that mends a test."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from nano_mining.command import command
from nano_mining.releases import pairs_of, read_release, releases_of
from nano_mining.task_check import check_task, log_folder, scratch_runtime
from nano_rl.tasks.task_file import read_tasks
from nano_shared.errors import UsageError

OLD = '''"""Sums."""

LIMIT = 10


def clamp(x, low, high):
    if x < low:
        return low
    return x


def half(x):
    return x // 2


def bound(x):
    return clamp(x, 0, LIMIT)
'''
NEW = '''"""Sums and more."""

LIMIT = 10
NAMES = ("clamp", "half", "bound")


def clamp(x, low, high):
    if x < low:
        return low
    return min(x, high)


def half(x):
    value = x / 2
    return value


def bound(number):
    return clamp(number, 0, LIMIT)


def double(x):
    return 2 * x
'''
TESTS = "from demo import sums\n\n\ndef test_low():\n    assert sums.clamp(0, 1, 3) == 1\n"
MORE = """

class TestMore:
    def test_high(self):
        assert sums.clamp(5, 1, 3) == 3


def test_bound():
    assert sums.bound(20) == 10


def test_half():
    assert sums.half(3) == 1.5


def test_double():
    assert sums.double(4) == 8
"""


def release(folder: Path, version: str, module: str, tests: str | None) -> None:
    """A source distribution whose set-up must not run here."""
    files = {
        "PKG-INFO": f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\nLicense: MIT\n",
        "setup.py": "raise SystemExit('on the host')\n", "src/demo/__init__.py": "",
        "src/demo/sums.py": module,
    }  # fmt: skip
    if tests is not None:
        files |= {"tests/__init__.py": "", "tests/test_sums.py": tests}
    with tarfile.open(folder / f"demo-{version}.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"demo-{version}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks for distributions in, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    return folder


def test_pip_lists_the_releases_and_runs_nothing_of_them(index: Path) -> None:
    for version in ("0.10", "0.9", "1.0rc1"):
        release(index, version, OLD, TESTS)
    (index / "demo-0.9-py3-none-any.whl").write_bytes(b"")
    found = releases_of("demo")
    assert [one.version for one in found] == ["0.9", "0.10"]
    assert [(pair.old.version, pair.new.version) for pair in pairs_of(found, True)] == [("0.9", "0.10")]
    assert str(read_release(found[0]).origin) == "demo 0.9"


@pytest.mark.parametrize(
    ("name", "says"),
    [("nobody-has-it", "no index of pip has any"), ("--pre", "is no name"), ("a/b", "is no name")],
)
def test_a_package_without_releases_costs_a_sentence(index: Path, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        command(releases=[name], out=index / "out.jsonl")


def test_sources_or_releases_are_named_and_not_both(index: Path) -> None:
    for sources, releases in ((None, None), ([index], ["demo"])):
        with pytest.raises(UsageError, match="either"):
            command(sources, releases=releases, out=index / "out.jsonl")


@pytest.mark.slow
def test_each_mended_test_becomes_a_task_with_the_smallest_change(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release(index, "0.1", OLD, None)
    release(index, "0.2", OLD, TESTS)
    release(index, "0.3", NEW, TESTS + MORE)
    release(index, "0.4", NEW.replace("2 * x", "x + x"), TESTS + MORE)
    out, report = tmp_path / "fixes.jsonl", tmp_path / "report.json"
    assert command(releases=["demo"], out=out, report=report, workers=2) == 0
    (found,) = json.loads(report.read_text())
    assert (found["pairs"], found["tasks"]) == (3, 2)
    assert found["refused"] == {
        "pairs: one of them has no modules or no tests": 1, "pairs: no test file changed": 1,
        "tests: ask for what the old source lacks: a feature": 1,
    }  # fmt: skip
    assert "demo: 2 tasks of 3 pairs of releases" in capsys.readouterr().out
    high, half = read_tasks(out)
    assert high.provenance.source == "demo 0.2 to 0.3: src/demo/sums.py::clamp"
    assert half.provenance.source == "demo 0.2 to 0.3: src/demo/sums.py::half"
    assert [a.arguments.get("new") for a in high.oracle or () if a.name == "edit_file"] == [
        "    return min(x, high)\n"
    ]
    # one change mends two tests, and the tests that it does not mend are taken out
    assert "test_sums.py::TestMore::test_high tests/test_sums.py::test_bound" in high.hidden.command  # type: ignore
    kept = high.hidden.files["tests/test_sums.py"]  # type: ignore[union-attr]
    assert ("test_low" in kept, "test_half" in kept, "test_double" in kept) == (True, False, False)
    with log_folder() as folder:
        runtime = scratch_runtime(folder, tmp_path / "home" / "blobs")
        with runtime.store:
            assert [check_task(task, runtime).reasons for task in (high, half)] == [(), ()]
