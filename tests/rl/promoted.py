"""What tests of promotion need: a home, command lines in this process, checkpoints without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nano_rl.cli import cli
from nano_shared.checkpoint import Manifest, atomic_checkpoint, checkpoints_dir, write_manifest
from nano_shared.command_line import run_command

NANO = Callable[..., tuple[int, str, str]]


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


def checkpoint(name: str, **changes: object) -> Path:
    """A checkpoint without weights: promotion looks at manifests alone."""
    target = checkpoints_dir() / name
    with atomic_checkpoint(target) as folder:
        (folder / "weights").write_text(name)
        fields = {
            "name": name, "kind": "adapter", "base_model": "base", "parent": "base", "profile": "compact-1",
            "profile_hash": "p", "template_hash": "t", "tools_hash": "u", "code_version": "1", "created": 1.0,
        }  # fmt: skip
        write_manifest(folder, Manifest.model_validate(fields | changes))
    return target
