"""Fixtures: a home of its own, and `nano-rl` command lines in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from promoted import NANO

from nano_rl.cli import cli
from nano_shared.command_line import run_command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NANO_LOG", raising=False)
    return tmp_path / "home"


@pytest.fixture
def nano(home: Path, capsys: pytest.CaptureFixture[str]) -> NANO:
    """Runs a command line; its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            run_command(cli, [str(a) for a in arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call
