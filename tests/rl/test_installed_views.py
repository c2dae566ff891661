"""What installed packages show beside a server and of a training, and what is said without any."""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from starlette.applications import Starlette

from nano_apis.command import _pages, _shown
from nano_coder.installed_views import TrainingView, Viewer
from nano_coder.serve.access import Access
from nano_preferences.command import _calibration
from nano_rl.training_record import LinesView, open_view
from nano_shared import extension_points
from nano_shared.errors import ConfigError
from nano_shared.store import LogStore

ROOT = "http://127.0.0.1:8000"


class Beeps(Viewer):
    """Shows trainings alone."""

    def training(self, *_given: Any) -> TrainingView:
        return TrainingView()


class Site(Viewer):
    """Shows logs and calibrations."""

    def served(self, *_given: Any) -> Starlette:
        return Starlette()

    def calibration(self, name: str, report: object) -> str:
        return f"<p>{name}"


class Broken(Viewer):
    def served(self, *_given: Any) -> Starlette:
        raise LookupError("no page")


beeps, site, broken, other = Beeps(), Site(), Broken(), object()
Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    def of(*names: str) -> None:
        entries = {name: (EntryPoint(name, f"{__name__}:{name}", "nano.views"),) for name in names}
        monkeypatch.setattr(extension_points, "_registered", lambda group: entries)

    return of


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    return LogStore.open(tmp_path / "log.db")


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True)


def test_without_a_view_the_apis_are_served_a_step_is_a_line_and_no_page_is_drawn(
    register: Register, store: LogStore
) -> None:
    register()
    assert _pages(store, Access()) == {}
    assert _shown({}, ROOT, Access()) == f"; pip install 'nano-rl-coder[view]' shows it on {ROOT}/view/"
    assert _shown({}, ROOT, Access(keys=["client"])) == "", "who may not see the log is offered no viewer"
    assert isinstance(open_view("mine", 3, [], console=terminal()), LinesView)
    assert _calibration("mine", None) is None  # type: ignore[arg-type]


def test_each_view_shows_what_it_can(register: Register, store: LogStore) -> None:
    register("beeps", "site")
    assert list(_pages(store, Access())) == ["site"]
    assert _pages(store, Access(keys=["client"])) == {}
    assert _shown(["site"], ROOT, Access()) == f", shown on {ROOT}/site/"
    assert not isinstance(open_view("mine", 3, [], console=terminal()), LinesView)
    assert _calibration("mine", None) == "<p>mine"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "told"),
    [("broken", "the view broken raised LookupError: no page"), ("other", "takes values of type Viewer")],
)
def test_a_view_that_fails_is_named(name: str, told: str, register: Register, store: LogStore) -> None:
    register(name)
    with pytest.raises(ConfigError, match=told):
        _pages(store, Access())
