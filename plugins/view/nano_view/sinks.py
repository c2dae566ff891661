"""Metric sinks of a training: TensorBoard, Weights & Biases and trackio, each imported only when asked for.

A sink is created before training begins, so that a missing library stops the command at once. It opens its
output at its first row, whose step is where the training continues.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

from nano_shared.errors import ConfigError

PROJECT = "nano"
STEP = "step"


class TensorBoardSink:
    """Event files in the folder of the training; steps that are run again are purged."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        _imported("tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # which needs that library

        self._open = partial(SummaryWriter, str(folder / "tensorboard"))
        self._writer: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        # what was written of this step and later ones is of a process that was killed
        self._writer = self._writer or self._open(purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """Weights & Biases: one run per training, continued when it is resumed. Curves are drawn over a metric
    `step`: W&B drops rows whose own step counter does not increase, as happens when a step is run again after
    a kill."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        _imported("wandb")
        self._name, self._folder, self._settings = name, folder, dict(settings)
        self._run: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run = self._run or self._begin()
        self._run.log({**metrics, STEP: step})

    def _begin(self) -> Any:
        import wandb

        run = wandb.init(
            project=PROJECT, name=self._name, id=run_id(self._folder), resume="allow", dir=str(self._folder),
            config=self._settings,
        )  # fmt: skip
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def run_id(folder: Path) -> str:
    """The same for a training whenever it goes on: a random id that its folder keeps."""
    kept = folder / "wandb.id"
    if not kept.exists():
        kept.write_text(token_hex(8), encoding="utf-8")
    return re.sub(r"[^a-z0-9]", "", kept.read_text(encoding="utf-8"))


class TrackioSink:
    """A local dashboard with W&B's calls: one run per training, continued when it is resumed."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        _imported("trackio")
        self._name, self._settings = name, dict(settings)
        self._run: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is None:
            import trackio

            how: Any = {"name": self._name, "resume": "allow", "config": self._settings}
            with redirect_stdout(sys.stderr):  # it announces the run, and our stdout is for results
                self._run = trackio.init(project=PROJECT, **how)
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            import trackio

            with redirect_stdout(sys.stderr):
                trackio.finish()


def _imported(library: str) -> None:
    """Raises ConfigError where a library is missing."""
    try:
        importlib.import_module(library)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.split(".")[0] != library:
            raise
        raise ConfigError(
            f"--log-to {library} needs the library {library}: pip install {library}; or leave {library} out"
        ) from None
