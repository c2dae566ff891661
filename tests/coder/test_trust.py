"""A project's nano.toml tightens; the rest counts after `nano-coder trust`, until the file changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nano_coder.cli import cli
from nano_coder.config import (
    UNTRUSTED_CHECK,
    AgentConfig,
    CoreConfig,
    load_config,
    read_config,
    read_project_file,
    user_config_path,
)
from nano_coder.grading.grade import grade_folder
from nano_coder.sandbox.protocol import open_sandbox
from nano_coder.trust import trust
from nano_coder.verify.trainable import may_teach
from nano_shared.errors import ConfigError, UsageError
from nano_shared.types import Task, Trust


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    for key in AgentConfig.model_fields:
        monkeypatch.delenv(f"NANO_{key.upper()}", raising=False)
    user_config_path().parent.mkdir(parents=True)
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


def nano(*arguments: str | Path, **more: Any) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False, **more)


BEYOND = {
    "model": "'openai:m'",
    "base_url": "'http://elsewhere/v1'",
    "api_key": "'theirs'",
    "sandbox": "'none'",
    "image": "'theirs'",
    "net": "'allow=theirs.example.org'",
    "profile": "'hermes-1'",
    "agent": "'theirs'",
    "agent_folders": "['/opt/theirs']",
    "tools": "['mine.py:tool']",
    "search": "{engine = 'http://elsewhere/{query}'}",
    "instructions": "['THEIRS.md']",
    "catalogue": "{theirs = {hub = 'their/model', file = 'x.gguf', bytes = 1, sha256 = '" + "0" * 64 + "'}}",
    "python": "'./python'",
    "temperature": "1.5",
    "git": "true",
    "dtype": "'bfloat16'",
    "device": "'cuda:7'",
    "kv_gib": "1000.0",
    "at_once": "1000",
    "log": "'postgresql://elsewhere/log'",
    "max_turns": "100000",
    "max_seconds": "1e9",
    "max_run_tokens": "1000000",
    "max_completion_tokens": "1000000",
    "tool_processes": "100000",
    "workspace_mb": "100000",
    "stall_seconds": "1e9",
    "retry_seconds": "1e9",
    "prices": "{m = {input = 0, output = 0}}",
    "tool_seconds": "1e9",
    "tool_memory_mb": "100000",
    "tool_output_bytes": "2000000000",
    "tries": "64",
    "owner": "'theirs'",
    "share": "'train'",
    "escalate": "'openai:m'",
    "escalate_from": "'best'",
}


def test_all_settings_are_either_tightened_or_refused(project: Path) -> None:
    tightens = {"check", "exclude", "redact", "max_cost"}
    assert set(BEYOND) | tightens >= set(CoreConfig.model_fields), "say what a stranger's file may do with it"


@pytest.mark.some(10)
@pytest.mark.parametrize("key", BEYOND)
def test_what_does_not_tighten_is_left_out_and_said(
    project: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "nano.toml").write_text(f"{key} = {BEYOND[key]}\n")
    config, sources = load_config({}, project)
    assert (config, sources[key]) == (AgentConfig(), "default")
    (said,) = capsys.readouterr().err.splitlines()
    for part in (str(project / "nano.toml"), key, f"nano-coder trust {project}"):
        assert part in said
    load_config({}, project)
    assert capsys.readouterr().err == "", "it is said once a process"


def test_what_tightens_counts_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user_config_path().write_text(
        "exclude = ['secrets']\nmax_turns = 10\n[redact]\npatterns = {own = 'OWN-1'}\n"
    )
    (project / "nano.toml").write_text(
        "max_turns = 3\nmax_seconds = 5\nmax_cost = 0.5\ncheck = 'make test'\nexclude = ['data']\n"
        "[redact]\non = 'write'\npatterns = {theirs = 'THEIRS-1'}\n"
    )
    config, sources = load_config({}, project)
    assert (config.max_turns, config.max_seconds, config.check) == (3, 5, "make test")
    assert config.max_cost == 0.5
    assert config.exclude == ("secrets", "data")
    assert sources["exclude"] == "user config, nano.toml"
    assert (config.redact.on, set(config.redact.patterns)) == ("write", {"own", "theirs"})
    assert capsys.readouterr().err == ""


def test_a_strangers_check_is_run_and_nothing_trains_on_it(project: Path, tmp_path: Path) -> None:
    (project / "nano.toml").write_text("check = 'true'\n")
    config, sources = load_config({}, project)
    assert (config.check, sources["check"]) == ("true", UNTRUSTED_CHECK)
    assert load_config({"check": "true"}, project)[1]["check"] == "flag"
    for trusted, trust_given in ((False, Trust.NONE), (True, Trust.USER_CHECK)):
        task = Task(key="k", prompt="p", check="true", check_trusted=trusted)
        verdict = grade_folder(task, project, None, open_sandbox("ns"))
        assert (verdict.reward, verdict.trust, may_teach(verdict)) == (1.0, trust_given, trusted)
    trust(project / "nano.toml", (project / "nano.toml").read_bytes())
    assert load_config({}, project)[1]["check"] == "nano.toml"


def test_the_users_rules_stay_whatever_the_project_says(project: Path) -> None:
    user_config_path().write_text(
        "exclude = ['secrets']\nmax_turns = 10\n[redact]\non = 'write'\npatterns = {own = 'OWN-1'}\n"
    )
    (project / "nano.toml").write_text(
        "max_turns = 24\nexclude = []\n[redact]\non = 'off'\nallow = ['(?s).*']\npatterns = {own = 'never'}\n"
    )
    found = read_config({}, project)
    assert (found.config.max_turns, found.config.exclude) == (10, ("secrets",))
    assert found.config.redact.model_dump() == {"on": "write", "allow": (), "patterns": {"own": "OWN-1"}}
    assert set(found.ignored) == {"max_turns", "redact.on", "redact.allow", "redact.patterns.own"}


def test_a_flag_adds_to_what_no_run_sees(project: Path) -> None:
    (project / "nano.toml").write_text("exclude = ['data']")
    assert load_config({"exclude": ("more",)}, project)[0].exclude == ("data", "more")


def test_trust_lasts_until_the_file_changes(project: Path) -> None:
    file = project / "nano.toml"
    file.write_text("log = 'theirs.db'\nmax_turns = 199\n")
    done = nano("trust", project, "--yes")
    assert done.exit_code == 0
    assert "log = 'theirs.db'" in done.stderr
    found = read_config({}, project)
    assert (found.config.log, found.config.max_turns, found.ignored) == ("theirs.db", 199, {})
    assert str(project) in nano("trust", "--list").stdout
    file.write_text("log = 'other.db'\nmax_turns = 199\n")
    assert read_config({}, project).config == AgentConfig()
    file.write_text("log = 'theirs.db'\nmax_turns = 199\n")
    assert read_config({}, project).config.log == "theirs.db"
    assert "not trusted any more" in nano("trust", project, "--revoke").stdout
    assert read_config({}, project).config == AgentConfig()
    assert json.loads(nano("trust", "--list", "--json").stdout) == {}


def test_trust_is_of_a_place_and_its_content(project: Path, tmp_path: Path) -> None:
    (project / "nano.toml").write_text("log = 'theirs.db'")
    nano("trust", project, "--yes")
    for name in ("copy", "copy/below"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nano.toml").write_text("log = 'theirs.db'")
        assert read_config({}, tmp_path / name).config.log is None
    (tmp_path / "link").symlink_to(project)
    assert read_config({}, tmp_path / "link").config.log == "theirs.db"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/nano.toml").symlink_to(project / "nano.toml")
    assert read_config({}, tmp_path / "elsewhere").config.log is None


def test_only_the_directorys_own_file_is_read(project: Path) -> None:
    (project / "nano.toml").write_text("max_turns = 3")
    (project / "below").mkdir()
    assert read_config({}, project / "below").project is None


def test_nothing_is_trusted_unasked(project: Path) -> None:
    (project / "nano.toml").write_text("log = 'theirs.db'\n")
    with pytest.raises(UsageError, match="--yes"):
        nano("trust", project)
    assert not trusted(project)


@pytest.mark.parametrize(("answer", "after"), [("n", False), ("", False), ("y", True)])
def test_on_a_terminal_it_asks(
    project: Path, answer: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "nano.toml").write_text("log = 'theirs.db'\n")
    monkeypatch.setattr("nano_coder.commands.config.on_terminal", lambda: True)
    assert nano("trust", project, input=f"{answer}\n").exit_code == int(not after)
    assert trusted(project) is after


def test_what_would_be_set_is_shown_before_and_cannot_drive_the_terminal(project: Path) -> None:
    (project / "nano.toml").write_text("api_key = 'theirs'\nmodel = 'x\\u001b[2Jy'\nmax_turns = 3\n")
    said = nano("trust", project, "--yes").stderr
    assert "\x1b" not in said
    assert "theirs" not in said
    assert said.index("max_turns = 3") < said.index("model = "), "what only trust gives stands last"


def trusted(project: Path) -> bool:
    file = read_project_file(project)
    return file is not None and file.trusted


@pytest.mark.parametrize("arguments", [(), ("DIR", "--list"), ("DIR",), ("DIR", "--yes")])
def test_asked_wrongly_it_says_how(project: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        nano("trust", *(str(project) if a == "DIR" else a for a in arguments))


def hostile(path: Path, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "gigabyte":
            with path.open("wb") as file:
                file.truncate(1 << 30)
        case "loop":
            path.symlink_to(path.name)
        case "nested":
            path.write_text("a = " + "[" * 30_000)
        case "long key":
            path.write_text("a." * 8_000 + "a = 1")
        case "digits":
            path.write_text("max_turns = " + "9" * 60_000)
        case "hexadecimal":
            path.write_text("max_turns = 0x" + "f" * 60_000)
        case "process":
            path.symlink_to("/proc/self/environ")


@pytest.mark.parametrize(
    "kind",
    ["pipe", "device", "gigabyte", "loop", "nested", "long key", "digits", "hexadecimal", "process"],
)  # fmt: skip
def test_a_file_that_is_none_is_refused_at_once(project: Path, kind: str) -> None:
    hostile(project / "nano.toml", kind)
    with pytest.raises(ConfigError) as raised:
        load_config({}, project)
    assert "nano.toml" in str(raised.value)


def test_a_damaged_list_trusts_nothing(project: Path) -> None:
    (project / "nano.toml").write_text("log = 'theirs.db'")
    (user_config_path().parent / "trusted.json").write_text('{"/": 3}')
    with pytest.raises(ConfigError, match=r"trusted\.json"):
        load_config({}, project)


def test_config_show_says_what_was_ignored_and_why(project: Path) -> None:
    (project / "nano.toml").write_text(
        "max_turns = 101\nlog = 'x'\nredact = {allow = ['a']}\napi_key = 'theirs'"
    )
    shown = json.loads(nano("config", "show", "-C", project, "--json").stdout)
    assert shown["max_turns"] == {"value": 100, "source": "default", "ignored": {"max_turns": 101}}
    assert shown["redact"]["ignored"] == {"redact.allow": ["a"]}
    assert shown["sandbox"] == {"value": "ns", "source": "default"}
    told = nano("config", "show", "-C", project)
    assert "log = 'x' is ignored" in told.stdout
    assert f"nano-coder trust {project}" in told.stderr
    assert "theirs" not in told.stdout + told.stderr + json.dumps(shown)


def test_what_is_shown_is_what_is_trusted(project: Path) -> None:
    """The bytes are read once: a file that changes while the user reads is not the one that counts."""
    (project / "nano.toml").write_text("log = 'shown.db'")
    file = read_project_file(project)
    assert file is not None
    (project / "nano.toml").write_text("log = 'swapped.db'")
    trust(file.path, file.content)
    assert read_config({}, project).config.log is None
