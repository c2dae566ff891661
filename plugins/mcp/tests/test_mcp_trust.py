"""Servers that a project brings count once the user trusts its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nano_coder.cli import cli
from nano_coder.config import AgentConfig, load_config, read_config, user_config_path
from nano_coder.trust import trust
from nano_shared.errors import ConfigError


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    user_config_path().parent.mkdir(parents=True)
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def nano(*arguments: str | Path, **more: Any) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False, **more)


def test_servers_of_an_untrusted_nano_toml_are_left_out_and_said(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "nano.toml").write_text("mcp = {servers = {theirs = {command = 'theirs'}}}\n")
    config, sources = load_config({}, project)
    assert (config, sources["mcp"]) == (AgentConfig(), "default")
    (said,) = capsys.readouterr().err.splitlines()
    for part in (str(project / "nano.toml"), "mcp", f"nano-coder trust {project}"):
        assert part in said
    trust(project / "nano.toml", (project / "nano.toml").read_bytes())
    assert list(read_config({}, project).config.mcp.servers) == ["theirs"]


def test_a_projects_mcp_servers_count_once_they_are_trusted(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / ".mcp.json"
    file.write_text('{"mcpServers": {"theirs": {"command": "run-me", "args": ["x"]}}}')
    user_config_path().write_text("[mcp.servers.mine]\nurl = 'http://127.0.0.1:1/mcp'\n")
    assert list(load_config({}, project)[0].mcp.servers) == ["mine"]
    assert f"{file} is ignored" in capsys.readouterr().err
    told = nano("trust", project, "--yes")
    assert 'theirs: {"command": "run-me", "args": ["x"]}' in told.stderr
    config, sources = load_config({}, project)
    assert sorted(config.mcp.servers) == ["mine", "theirs"]
    assert sources["mcp"] == "user config, .mcp.json"
    file.write_text(file.read_text().replace("run-me", "run-other"))
    assert list(load_config({}, project)[0].mcp.servers) == ["mine"]
    file.write_text("{")
    trust(file, b"{")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config({}, project)
