"""Where the numbers of a training go beside its own file: a sink each, its library imported when asked for.

A sink is made before training begins, so that a missing library stops the command and not the training. It
opens what it writes to at its first row, whose step is where the training goes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nano_shared.errors import ConfigError, UsageError

SINKS = {
    "tensorboard": ("nano_rl.report.sinks.tensorboard", "tensorboard"),
    "wandb": ("nano_rl.report.sinks.wandb", "wandb"),
    "trackio": ("nano_rl.report.sinks.trackio", "trackio"),
}
"""name -> the module with its `open_sink`, and the library that module needs"""


class Sink(Protocol):
    """Takes the metrics of one step after another."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step. The first call may go back to a step that an earlier process wrote: where
        the library can, what was written from that step on is replaced."""

    def close(self) -> None:
        """No more rows; what was written is kept."""


def open_sinks(names: Sequence[str], *, name: str, folder: Path, settings: Mapping[str, Any]) -> list[Sink]:
    """A sink for each name. `name` is the training's, `folder` where it lives, `settings` its config.

    Raises UsageError for an unknown name and ConfigError where a library is missing.
    """
    unknown = [n for n in names if n not in SINKS]
    if unknown:
        raise UsageError(f"--log-to {unknown[0]}: no such place; there are {', '.join(SINKS)}")
    return [_open(n, name=name, folder=folder, settings=settings) for n in dict.fromkeys(names)]


def _open(kind: str, *, name: str, folder: Path, settings: Mapping[str, Any]) -> Sink:
    module, library = SINKS[kind]
    try:
        importlib.import_module(library)
        made: Sink = importlib.import_module(module).open_sink(name, folder, settings)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] not in (library, "tensorboard"):
            raise
        raise ConfigError(
            f"--log-to {kind} needs the library {library}: pip install {library}; or leave {kind} out"
        ) from None
    return made
