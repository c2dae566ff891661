"""TensorBoard: event files in the folder of the training; steps that are run again are purged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"


class TensorBoardSink:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # what was written of this step and later ones is of a process that was killed
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def open_sink(name: str, folder: Path, settings: Mapping[str, Any]) -> TensorBoardSink:
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401 (fails now rather than at the first row)

    return TensorBoardSink(folder / FOLDER)
