"""Commands of installed packages: found by entry point, named where missing, refused where they clash."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nano_shared import extension_points
from nano_shared.command_line import lazy_app, run_command

app = lazy_app("program", {"see": ("+view", "Look."), "own": (f"{__name__}:own", "Ours.")}, help="A program.")


def own() -> int:
    return 0


def greet(name: str) -> int:
    """Greet."""
    print(f"hello {name}")
    return 3


Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    def of(**targets: str) -> None:
        entries = {
            f"program.{name}": (EntryPoint(f"program.{name}", target, "nano.commands"),)
            for name, target in targets.items()
        }
        monkeypatch.setattr(extension_points, "_registered", lambda group: entries)

    return of


def ends(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_command(app, list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code, "".join(capsys.readouterr())


def test_a_command_of_another_package_is_listed_with_its_source_and_runs(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(greet=f"{__name__}:greet")
    assert "greet" in CliRunner().invoke(app, ["--help"]).output
    assert ends(capsys, "greet", "Bonn") == (3, "hello Bonn\n")
    code, told = ends(capsys, "greet")
    assert code == 2
    assert "'name'" in told


def test_a_command_whose_plugin_is_missing_says_which_package_brings_it(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    code, told = ends(capsys, "see")
    assert code == 2
    assert "`program see` comes with the plug-in view, which is not installed here" in told
    assert "pip install 'nano-rl-coder[view]'" in told


@pytest.mark.parametrize(
    ("target", "told"),
    [("nano_nowhere:command", "cannot be loaded"), (f"{__name__}:nothing", "cannot be loaded")],
)
def test_a_broken_plugin_is_one_sentence(
    target: str, told: str, register: Register, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    register(see=target)
    code, text = ends(capsys, "see")
    assert code == 3
    assert told in text
    assert len(text.splitlines()) == 1


def test_two_packages_of_one_command_are_both_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tuple(EntryPoint("program.see", f"{name}:command", "nano.commands") for name in ("one", "other"))
    monkeypatch.setattr(extension_points, "_registered", lambda group: {"program.see": both})
    code, told = ends(capsys, "see")
    assert code == 3
    assert "several 'program.see': one:command" in told
    assert "other:command" in told


def test_our_own_command_is_never_replaced(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(own=f"{__name__}:greet")
    assert ends(capsys, "own")[0] == 0
