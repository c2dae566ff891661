"""Weights & Biases: one run for a training, also when it is resumed.

The step is a metric of its own that every curve is drawn over: W&B's own counter only goes up, and a step
that is run again after a kill would be dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = "nano"
STEP = "step"


class WandbSink:
    def __init__(self, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._folder = folder
        self._settings = dict(settings)
        self._run: Any = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run = self._run or self._begin()
        self._run.log({**metrics, STEP: step})

    def _begin(self) -> Any:
        import wandb

        run = wandb.init(
            project=PROJECT,
            name=self._name,
            id=run_id(self._folder),
            resume="allow",
            dir=str(self._folder),
            config=self._settings,
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        return run

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def run_id(folder: Path) -> str:
    """The same for a training whenever it goes on: a random id that its folder keeps."""
    from secrets import token_hex

    kept = folder / "wandb.id"
    if not kept.exists():
        kept.write_text(token_hex(8), encoding="utf-8")
    return re.sub(r"[^a-z0-9]", "", kept.read_text(encoding="utf-8"))


def open_sink(name: str, folder: Path, settings: Mapping[str, Any]) -> WandbSink:
    import wandb  # noqa: F401 (fails now rather than at the first row)

    return WandbSink(name, folder, settings)
