"""Precedence: flag > environment > nano.toml > user config > default; each value says where it is from."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nano_coder.cli import cli
from nano_coder.config import AgentConfig, load_config, user_config_path
from nano_coder.trust import trust
from nano_shared.errors import ConfigError, UsageError
from nano_shared.settings import parse_toml


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for key in AgentConfig.model_fields:
        monkeypatch.delenv(f"NANO_{key.upper()}", raising=False)


def test_each_layer_wins_over_the_ones_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ["default", "user config", "nano.toml", "environment", "flag"]
    user_config_path().parent.mkdir(parents=True)
    user_config_path().write_text("max_turns = 1\nmax_seconds = 1\nmodel = 'user'\ndtype = 'float32'\n")
    (tmp_path / "nano.toml").write_text("max_turns = 2\nmax_seconds = 2\nmodel = 'project'\n")
    trust(tmp_path / "nano.toml", (tmp_path / "nano.toml").read_bytes())
    monkeypatch.setenv("NANO_MAX_TURNS", "3")
    monkeypatch.setenv("NANO_MAX_SECONDS", "3")
    config, sources = load_config({"max_turns": 4, "model": None}, tmp_path)
    values = (config.temperature, config.dtype, config.model, config.max_seconds, config.max_turns)
    assert values == (None, "float32", "project", 3.0, 4)
    assert [sources[k] for k in ("temperature", "dtype", "model", "max_seconds", "max_turns")] == layers


def test_without_any_layer_all_is_default(tmp_path: Path) -> None:
    config, sources = load_config({}, tmp_path)
    assert config == AgentConfig()
    assert set(sources) == set(AgentConfig.model_fields)
    assert set(sources.values()) == {"default"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"max_turn = 3", r"nano.toml: max_turn: no such setting; did you mean max_turns\?"),
        (b"max_turns = 0", "nano.toml: max_turns = 0: input should be greater than or equal to 1"),
        (b"max_turns = 'many'", "nano.toml: max_turns = 'many': "),
        (b"temperature = inf", "nano.toml: temperature = inf: input should be a finite number"),
        (b"dtype = 'float8'", "nano.toml: dtype = 'float8': "),
        (b"max_turns =", "cannot read .*nano.toml: "),
        (b"model = '\xff'", "cannot read .*nano.toml: "),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "nano.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=said) as raised:
        load_config({}, tmp_path)
    assert raised.value.exit_code == 3


def test_a_wrong_flag_or_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--max-turns: max_turns = 0: input should be greater"):
        load_config({"max_turns": 0}, tmp_path)
    monkeypatch.setenv("NANO_TEMPERATURE", "hot")
    with pytest.raises(ConfigError, match="environment: temperature = 'hot': "):
        load_config({}, tmp_path)


def test_a_misspelt_variable_is_named_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NANO_HOME", "NANO_JUDGE_API_KEY", "NANO_ALLOW_NO_SANDBOX", "NANO_OF_ANOTHER_PROGRAM"):
        monkeypatch.setenv(name, "x")
    assert load_config({}, tmp_path)[0] == AgentConfig()
    monkeypatch.setenv("NANO_MAX_TURN", "3")
    with pytest.raises(ConfigError, match=r"environment: NANO_MAX_TURN: .*did you mean NANO_MAX_TURNS\?"):
        load_config({}, tmp_path)


def test_the_environment_sets_names_and_tables_as_a_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_EXCLUDE", "data, *.ckpt")
    monkeypatch.setenv("NANO_REDACT", "write")
    monkeypatch.setenv("NANO_MODEL", "")
    config, sources = load_config({}, tmp_path)
    assert (config.exclude, config.redact.on, config.model) == (("data", "*.ckpt"), "write", None)
    assert (sources["exclude"], sources["model"]) == ("environment", "default")


def test_the_log_of_the_configuration_is_the_one_that_log_commands_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    user_config_path().parent.mkdir(parents=True)
    user_config_path().write_text(f"log = '{tmp_path}/mine.db'\n")

    def path(*arguments: str) -> str:
        return CliRunner().invoke(cli, arguments).output.strip()

    assert path("log", "path") == f"{tmp_path}/mine.db"
    monkeypatch.setenv("NANO_LOG", str(tmp_path / "unset.db"))  # which the program's own option sets
    assert path("--log", f"{tmp_path}/a.db", "log", "path") == f"{tmp_path}/a.db"
    assert path("log", "path", "--log", f"{tmp_path}/b.db") == f"{tmp_path}/b.db"


def test_the_config_of_a_run_is_printed_without_the_key(tmp_path: Path) -> None:
    given = [
        "run",
        "--print-config",
        "-C",
        str(tmp_path),
        "--set",
        "api_key=s3cret",
        "--limit",
        "max_turns=3",
    ]
    shown = CliRunner().invoke(cli, given)
    assert (shown.exit_code, "s3cret" in shown.output) == (0, False)
    assert parse_toml(shown.output, AgentConfig).max_turns == 3


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "nano.toml").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*nano.toml: .*directory"):
        load_config({}, tmp_path)


def test_prices_of_models_are_tables_of_the_configuration(tmp_path: Path) -> None:
    user_config_path().parent.mkdir(parents=True)
    user_config_path().write_text('[prices."my.model"]\ninput = 1\noutput = 2.5\n')
    config, _ = load_config({}, tmp_path)
    assert config.prices["my.model"].cached is None
    shown = CliRunner().invoke(cli, ["run", "x", "-C", str(tmp_path), "--print-config"])
    assert parse_toml(shown.stdout, AgentConfig).prices == config.prices
    user_config_path().write_text("[prices.m]\ninput = -1\noutput = 1\n")
    with pytest.raises(ConfigError, match="user config: prices = "):
        load_config({}, tmp_path)
