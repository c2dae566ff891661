"""Leaves: folders that nothing but the command line and entry points uses, deleted one by one in a copy."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[1]
LEAVES = (
    "nano_coder/view",
    "nano_rl/report",
)
CORE_TESTS = (
    "tests/coder/test_agent.py", "tests/coder/test_runtime.py", "tests/coder/test_dialects.py",
    "tests/coder/test_given_tools.py", "tests/rl/test_loss.py", "tests/rl/test_advantage.py",
    "tests/rl/test_objectives.py",
)  # fmt: skip
"""of the core: they import no leaf themselves"""
IMPORT_ALL = """
import importlib, pathlib, sys
for package in ("shared/nano_shared", "nano_coder", "nano_rl"):
    for file in sorted(pathlib.Path(package).rglob("*.py")):
        parts = file.relative_to("shared" if package.startswith("shared") else ".").with_suffix("").parts
        alone = {"commands", "cli", "inside", "migrations", "__main__"}
        if alone & set(parts):
            continue
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert pathlib.Path(module.__file__).is_relative_to(pathlib.Path.cwd()), module
"""


@pytest.mark.parametrize("leaf", LEAVES)
def test_the_core_works_without_a_leaf(leaf: str, tmp_path: Path) -> None:
    for part in ("nano_coder", "nano_rl", "shared", "tests"):
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / leaf)
    _unregister(leaf, tmp_path)
    path = os.pathsep.join((str(tmp_path), str(tmp_path / "shared")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pytest_arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *CORE_TESTS]
    for arguments in (["-c", IMPORT_ALL], pytest_arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def _unregister(leaf: str, folder: Path) -> None:
    """A copy of the installed metadata without the leaf's entry points; the first one on the path counts."""
    (found,) = (d for d in importlib.metadata.distributions() if d.name == "nano-rl-coder")
    info = folder / f"nano_rl_coder-{found.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(found.read_text("METADATA") or "")
    module = leaf.replace("/", ".")
    lines = (found.read_text("entry_points.txt") or "").splitlines(keepends=True)
    (info / "entry_points.txt").write_text("".join(line for line in lines if f"= {module}." not in line))
