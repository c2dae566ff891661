"""The commands of docs/guide.md run as they stand, one after another, on the project in examples/shop."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
COMMANDS = [line[2:] for block in BLOCKS for line in block.splitlines() if line.startswith("$ ")]
SHORTER = (("nano-rl improve", "nano-rl improve --minutes 0.5"),)
"""what a test changes in commands that would take an hour"""
MAY_FAIL = ('nano-coder run "The tests fail. Fix it."',)
"""a policy of half a minute mends nothing"""


def test_the_guide_begins_with_its_project_and_ends_with_a_promotion() -> None:
    assert COMMANDS[0] == "cp -r examples/shop shop"
    assert "promoted for funcy" in GUIDE
    assert all(any(old in command for command in COMMANDS) for old, _ in SHORTER)


def test_the_project_fails_as_shipped_and_one_sign_mends_it(tmp_path: Path) -> None:
    for sign, ends_with in (("-", 1), ("+", 0)):
        folder = tmp_path / f"shop{ends_with}"
        folder.mkdir()
        for file in (ROOT / "examples" / "shop").glob("*.py"):
            text = file.read_text(encoding="utf-8")
            (folder / file.name).write_text(text.replace("price - price", f"price {sign} price"))
        argv = [
            sys.executable,
            "-B",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(folder),
            ".",
        ]
        assert subprocess.run(argv, cwd=folder, capture_output=True, check=False).returncode == ends_with


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_guide_runs(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    own = {name: value for name, value in os.environ.items() if not name.startswith("NANO_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**own, "NANO_HOME": str(tmp_path / "home"), "PATH": path}
    for command in COMMANDS:
        short = functools.reduce(lambda text, pair: text.replace(*pair), SHORTER, command)
        done = subprocess.run(
            short, shell=True, cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        allowed = (0, 1, 5) if command.startswith(MAY_FAIL) else (0,)
        assert done.returncode in allowed, (command, done.stdout[-3000:], done.stderr[-3000:])
    assert "price + price * rate" in (work / "shop" / "prices.py").read_text(encoding="utf-8")
