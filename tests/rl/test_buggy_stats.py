"""What the example promises: its families are absent from training, and one changed operator mends it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

from nano_shared.types import Split
from nano_suites.functions.admitted_program import belongs

EXAMPLE = Path(__file__).parents[2] / "examples" / "buggy_stats"
BUG, FIX = "max(kept) + min(kept)", "max(kept) - min(kept)"


def test_its_families_belong_to_the_test_split() -> None:
    mended = (EXAMPLE / "stats.py").read_text().replace(BUG, FIX)
    families = (EXAMPLE / "test_stats.py").read_text().split("\n")[1].removeprefix("# ").split()
    functions = ast.parse(mended).body
    assert len(families) == len(functions) == 3
    for family, function in zip(families, functions, strict=True):
        assert belongs(family, ast.unparse(function), Split.TEST), family


def test_it_fails_as_shipped_and_passes_when_mended(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "buggy", ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "buggy" / "stats.py"
    assert _pytest(source.parent) == 1
    assert source.read_text().count(BUG) == 1
    source.write_text(source.read_text().replace(BUG, FIX))
    shutil.rmtree(source.parent / "__pycache__", ignore_errors=True)
    assert _pytest(source.parent) == 0


def _pytest(folder: Path) -> int:
    argv = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    return subprocess.run([*argv, "."], cwd=folder, capture_output=True, check=False).returncode
