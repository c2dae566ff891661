"""Views: what installed packages show of a log that is served, of a training that runs, of a reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from nano_shared.extension_points import Extensions

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from nano_coder.serve.access import Access
    from nano_shared.command_line import Console
    from nano_shared.store import LogStore


class TrainingView:
    """A view of a running training that shows nothing; the base of those that do.

    A context manager, which owns the terminal until it exits.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def run_done(self) -> None:
        """Called when a rollout of the current step has ended."""

    def step_done(self, done: int, total: int, row: Mapping[str, float]) -> None:
        """Called when a step has ended, with its metrics."""


class Viewer:
    """An extension of the group `nano.views`; the base shows nothing. Its methods import what they need."""

    def served(self, store: LogStore, access: Access) -> ASGIApp | None:
        """What `nano-coder serve` serves below /NAME/, where NAME is that of the extension. It checks keys by
        `access` itself, and is not asked for where clients have keys and nobody has an admin key."""
        return None

    def training(
        self, name: str, total: int, rows: Sequence[Mapping[str, float | None]], console: Console
    ) -> TrainingView | None:
        """What a training of `total` steps is shown on while it runs; `rows` are its metrics so
        far. The first view that is not None is taken."""
        return None

    def calibration(self, name: str, report: object) -> str | None:
        """The page (HTML) of a reward model's calibration, which is kept in its checkpoint; `report` is a
        `RewardModelReport`."""
        return None


VIEWS = Extensions[Viewer]("nano.views", Viewer)
