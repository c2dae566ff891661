"""Settings, tools and sandboxes that plug-ins bring, and what is said where the plug-in is missing."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from nano_coder import config as configuration
from nano_coder.config import (
    AgentConfig,
    CoreConfig,
    ProjectTable,
    SettingsTable,
    load_config,
    redacting_store,
    typed_layer,
    with_tables,
)
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.tools.tool import TOOLS, Place, Tool, ToolContext, further_tools, tool
from nano_coder.trust import trust
from nano_shared import extension_points
from nano_shared.errors import ConfigError, UsageError
from nano_shared.store import LogStore


class Colours(BaseModel):
    """Colours by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    wall: str = "white"
    door: str = "brown"


def read(path: Path, content: bytes) -> dict[str, str]:
    if not content:
        raise ValueError("nothing in it")
    return {"wall": content.decode()}


TABLE = SettingsTable(
    model=Colours, project=ProjectTable(file=".colours", brings="colours, which are seen", read=read)
)


@tool()
def paint(context: ToolContext, colour: str) -> str:
    """Paint."""
    return colour


def painters(config: AgentConfig, place: Place) -> list[Tool]:
    return [paint]


def failing(config: AgentConfig, place: Place) -> list[Tool]:
    raise ValueError("no paint left")


Register = Callable[..., None]


@pytest.fixture(autouse=True)
def register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Register:
    """Of a group nothing but these names is registered, and the configuration has the tables of them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    real = extension_points._registered

    def of(group: str, **targets: str) -> None:
        entries = {name: (EntryPoint(name, target, group),) for name, target in targets.items()}
        monkeypatch.setattr(extension_points, "_registered", lambda of: entries if of == group else real(of))
        monkeypatch.setattr(configuration, "AgentConfig", with_tables("AgentConfig", CoreConfig))
        monkeypatch.setattr(configuration, "_environment", lambda: ({}, {}))

    return of


def test_a_table_is_checked_by_the_model_of_its_plugin(register: Register, tmp_path: Path) -> None:
    register("nano.settings", colours=f"{__name__}:TABLE")
    (tmp_path / "nano.toml").write_text("[colours]\nwall = 'red'\n")
    trust(tmp_path / "nano.toml", (tmp_path / "nano.toml").read_bytes())
    config, sources = load_config({"colours": {"door": "blue"}}, tmp_path)
    assert config.colours == Colours(wall="red", door="blue")  # type: ignore[attr-defined]
    assert sources["colours"] == "nano.toml, flag"
    with pytest.raises(ConfigError, match="user config: colours = "):
        typed_layer("user config", {"colours": {"roof": "red"}})


def test_a_plugins_table_and_file_count_for_nothing_in_a_project_that_is_not_trusted(
    register: Register, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register("nano.settings", colours=f"{__name__}:TABLE")
    (tmp_path / "nano.toml").write_text("[colours]\nwall = 'red'\n")
    (tmp_path / ".colours").write_bytes(b"green")
    config, sources = load_config({}, tmp_path)
    assert (config.colours, sources["colours"]) == (Colours(), "default")  # type: ignore[attr-defined]
    told = capsys.readouterr().err
    assert "nano.toml sets colours: ignored" in told
    assert ".colours is ignored" in told
    trust(tmp_path / ".colours", b"green")
    assert load_config({}, tmp_path)[0].colours == Colours(wall="green")  # type: ignore[attr-defined]
    (tmp_path / ".colours").write_bytes(b"")
    trust(tmp_path / ".colours", b"")
    with pytest.raises(ConfigError, match=r"\.colours raised ValueError: nothing in it"):
        load_config({}, tmp_path)


def test_a_table_takes_no_setting_of_ours(register: Register) -> None:
    with pytest.raises(ConfigError, match="model is a setting of nano"):
        register("nano.settings", model=f"{__name__}:TABLE")


def test_a_broken_table_is_one_sentence_of_what_reads_settings(register: Register, tmp_path: Path) -> None:
    register("nano.settings", colours=f"{__name__}:Colours")  # as `--help` does
    with pytest.raises(ConfigError, match="takes values of type SettingsTable"):
        load_config({}, tmp_path)
    with (
        LogStore.open(tmp_path / "log.db") as store,
        pytest.raises(ConfigError, match="takes values of type SettingsTable"),
    ):
        redacting_store(store, config=CoreConfig())


@pytest.mark.parametrize("source", ["user config", "nano.toml", "flag"])
def test_a_setting_of_our_plugin_that_is_missing_names_it_and_the_way(
    source: str, register: Register
) -> None:
    register("nano.settings")
    with pytest.raises(ConfigError, match=rf"{source}: mcp: .*pip install 'nano-rl-coder\[mcp\]'") as told:
        typed_layer(source, {"mcp": {"servers": {}}})
    assert told.value.exit_code == 3


def test_a_variable_of_a_missing_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_points, "_registered", lambda group: {})
    monkeypatch.setattr(configuration, "AgentConfig", CoreConfig)
    monkeypatch.setenv("NANO_MCP", "{}")
    with pytest.raises(ConfigError, match=r"environment: NANO_MCP: .*'nano-rl-coder\[mcp\]'"):
        configuration._environment()


@pytest.mark.parametrize("kind", ["bwrap", "podman"])
def test_a_sandbox_whose_plugin_is_missing_names_it_and_the_way(kind: str, register: Register) -> None:
    register("nano.sandboxes", ns="nano_coder.sandbox.namespaces:open_ns")
    with pytest.raises(UsageError, match=rf"'{kind}' comes with .*'nano-rl-coder\[containers\]'"):
        open_sandbox(kind)


def test_tools_of_plugins_join_the_registry_and_failing_ones_are_named(register: Register) -> None:
    def place() -> None:
        raise AssertionError("nobody asked for it")

    register("nano.run_tools", painters=f"{__name__}:painters")
    assert further_tools(AgentConfig(), place) == ["paint"]  # type: ignore[arg-type]
    TOOLS._given.clear()
    register("nano.run_tools", failing=f"{__name__}:failing")
    with pytest.raises(ConfigError, match=r"nano\.run_tools failing raised ValueError: no paint left"):
        further_tools(AgentConfig(), place)  # type: ignore[arg-type]
